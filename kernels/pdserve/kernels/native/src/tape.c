// Runs a forward pass: one operation after the other, each by all threads of the team. Products are shared out by outputs, attention by
// chunks and heads, all else by rows; so what a thread computes does not depend on how many there are.
#include "tape.h"

struct pass {
    const struct operation *operations;
    int first;
    int end;
    const struct step *step;
};

static void keep(const struct operation *op, const struct step *step, int first, int end)
{
    for (int i = first; i < end; i++)
        memcpy((float *)op->y + i * op->y_stride, (const float *)op->x + step->kept[i] * op->x_stride, sizeof(float) * (size_t)op->width);
}

static void run_rows(const struct operation *op, const struct step *step, int first, int end)
{
    switch (op->kind) {
    case OPERATION_EMBED:
        embed(&op->weight, step->token_ids, op->factor, op->y, op->y_stride, first, end);
        break;
    case OPERATION_KEEP:
        keep(op, step, first, end);
        break;
    case OPERATION_NORM:
        normalize(&op->norm, op->x, op->x_stride, op->y, op->y_stride, op->rounds, first, end);
        break;
    case OPERATION_ANGLES:
        find_angles(&op->rotation, step->chunks, step->num_chunks, op->y, first, end);
        break;
    case OPERATION_ROTATE:
        rotate(&op->rotation, op->y, op->x, op->x_stride, first, end);
        break;
    case OPERATION_WRITE:
        write_cache(&op->attention, step->chunks, step->num_chunks, op->x, op->y, op->x_stride, first, end);
        break;
    case OPERATION_ACTIVATE:
        activate(op->activation, op->is_gated, op->x, op->x_stride, op->width, op->y, op->y_stride, op->rounds, first, end);
        break;
    case OPERATION_SCALE:
        scale_and_cap(op->x, op->x_stride, op->width, op->factor, op->cap, first, end);
        break;
    case OPERATION_SUMMARIZE:
        summarize(op->x, op->x_stride, op->width, op->y, first, end);
        break;
    }
}

static int share(int count, int thread, int num_threads) { return (int)((int64_t)count * thread / num_threads); }

static void run(const struct operation *op, const struct step *step, int thread, int num_threads)
{
    int rows = op->of_kept ? step->num_kept : step->num_rows;
    if (op->kind == OPERATION_PRODUCT) {
        int count = num_panels(&op->weight);
        product(&op->weight, op->x, op->x_stride, op->y, op->y_stride, rows, op->adds, share(count, thread, num_threads),
                share(count, thread + 1, num_threads));
    } else if (op->kind == OPERATION_ATTEND) {
        attend(&op->attention, step->chunks, step->num_chunks, op->x, op->x_stride, op->y, op->y_stride, op->rounds, thread,
               num_threads);
    } else {
        run_rows(op, step, share(rows, thread, num_threads), share(rows, thread + 1, num_threads));
    }
}

static void run_pass(void *what, struct team *team, int thread, int num_threads)
{
    const struct pass *pass = what;
    for (int i = pass->first; i < pass->end; i++) {
        run(pass->operations + i, pass->step, thread, num_threads);
        if (i + 1 < pass->end)
            team_meet(team);
    }
}

void tape_run(struct team *team, const struct operation *operations, int first, int end, const struct step *step)
{
    struct pass pass = {operations, first, end, step};
    team_run(team, run_pass, &pass);
}

void tape_sizes(int32_t sizes[3])
{
    sizes[0] = sizeof(struct operation);
    sizes[1] = sizeof(struct step);
    sizes[2] = sizeof(struct chunk);
}
