// A team of threads: the caller's, and others that sleep until there is work.
//
// Between two operations of a step the threads meet. They wait for each other actively only for microseconds, then sleep: on a
// machine that has other work, waiting actively for a thread that does not run takes the time from the one that would wake it.
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000 // some microseconds

struct team {
    int num_threads;
    pthread_t *others; // [num_threads - 1]
    work work;
    void *what;
    _Atomic uint32_t round; // grows by one with each run, and goes round
    _Atomic uint32_t num_here;
    _Atomic uint32_t meeting; // grows by one with each meeting
    _Atomic int is_over;
};

struct member {
    struct team *team;
    int thread;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void wait_while(_Atomic uint32_t *word, uint32_t value)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value)
            return;
        relax();
    }
    while (atomic_load_explicit(word, memory_order_acquire) == value)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

void team_meet(struct team *team)
{
    if (team->num_threads == 1)
        return;
    uint32_t meeting = atomic_load_explicit(&team->meeting, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->num_here, 1, memory_order_acq_rel) + 1 == (uint32_t)team->num_threads) {
        atomic_store_explicit(&team->num_here, 0, memory_order_relaxed);
        atomic_store_explicit(&team->meeting, meeting + 1, memory_order_release);
        wake_all(&team->meeting);
    } else {
        wait_while(&team->meeting, meeting);
    }
}

static void *attend_runs(void *argument)
{
    struct member member = *(struct member *)argument;
    struct team *team = member.team;
    free(argument);
    for (uint32_t round = 0;; round++) {
        wait_while(&team->round, round);
        if (atomic_load_explicit(&team->is_over, memory_order_acquire))
            return NULL;
        team->work(team->what, team, member.thread, team->num_threads);
        team_meet(team);
    }
}

struct team *team_new(int num_threads)
{
    struct team *team = calloc(1, sizeof *team);
    if (!team)
        return NULL;
    team->num_threads = 1;
    team->others = calloc((size_t)num_threads, sizeof *team->others);
    while (team->others && team->num_threads < num_threads) {
        struct member *member = malloc(sizeof *member);
        if (!member)
            break;
        *member = (struct member){team, team->num_threads};
        if (pthread_create(&team->others[team->num_threads - 1], NULL, attend_runs, member)) {
            free(member);
            break;
        }
        team->num_threads++;
    }
    if (team->others && team->num_threads == num_threads)
        return team;
    team_free(team);
    return NULL;
}

void team_free(struct team *team)
{
    atomic_store_explicit(&team->is_over, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&team->round, 1, memory_order_release);
    wake_all(&team->round);
    for (int i = 0; i < team->num_threads - 1; i++)
        pthread_join(team->others[i], NULL);
    free(team->others);
    free(team);
}

void team_run(struct team *team, work work, void *what)
{
    team->work = work;
    team->what = what;
    if (team->num_threads > 1) {
        atomic_fetch_add_explicit(&team->round, 1, memory_order_release);
        wake_all(&team->round);
    }
    work(what, team, 0, team->num_threads);
    team_meet(team);
}
