/* The thread team of the process: started by the first run, woken for each run, asleep soon after it.
 *
 * Owns threads, their places on the CPUs, their scratch memory and the barrier. Knows no operators. The thread that
 * calls `team_run` takes part as tid 0 and is never pinned: the workers are, and step aside when one of them sits on
 * the core that the caller came from. Runs are one at a time, in the order in which they get the lock. */
#ifndef HEADRACE_TEAM_H
#define HEADRACE_TEAM_H

#include <stdint.h>

namespace hr {

enum { MAX_THREADS = 256 };

/* Threads of a run that names no number: one for each core that the process may use (its affinity mask, and the quota
 * of its control group), unless `set_num_threads` said otherwise. */
int num_threads();
void set_num_threads(int num); /* 1 ... MAX_THREADS; 0 is the default again */

/* What the threads of a run share. HrTask.counter points at `counter`: 0 at the start and after each barrier. */
struct alignas(128) Work {
    int64_t counter;
};

/* Calls fn(context, tid, num) on `num` threads (0: num_threads()) and returns when all have returned. Not to be called
 * from within a run. Returns the number of threads that took part. */
typedef void (*TeamFn)(void* context, int tid, int num);
int team_run(int num, TeamFn fn, void* context);

/* Within a run: waits for all threads of it, and puts the counter back to 0. */
void team_barrier(int num);
Work* team_work();
/* HR_SCRATCH_BYTES of this thread; pages come into being as they are touched. */
void* team_scratch(int tid);

int64_t now_ns(); /* of the monotonic clock */

/* One turn of a loop that waits. */
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

}  // namespace hr
#endif
