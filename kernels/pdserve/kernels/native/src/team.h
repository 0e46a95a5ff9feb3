// Threads that work on one thing at a time; see team.c.
#ifndef PDSERVE_TEAM_H
#define PDSERVE_TEAM_H

#define EXPORTED __attribute__((visibility("default")))

struct team;

// What each thread of a team runs: `thread` is 0 … num_threads - 1.
typedef void (*work)(void *what, struct team *team, int thread, int num_threads);

// `num_threads` counts the caller. NULL if the system gives no more threads.
EXPORTED struct team *team_new(int num_threads);
EXPORTED void team_free(struct team *team);

// Run `work` in all threads; return when all of them are done. One caller at a time.
void team_run(struct team *team, work work, void *what);

// Inside `work`: wait until every thread is here. What was written before is seen by all after it.
void team_meet(struct team *team);

#endif
