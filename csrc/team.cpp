#include "include/team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "include/kernels.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace hr {

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

namespace {

/* A thread that waits spins, then lets others run, then sleeps. Spinning ends where a sleeper's way back (some 50 us)
 * no longer matters beside what was waited already. */
const int64_t SPIN_NS = 100000, YIELD_NS = 500000;

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}
#else
pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sleep_end = PTHREAD_COND_INITIALIZER;
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
    pthread_mutex_lock(&sleep_lock);
    if (word.load() == seen) pthread_cond_wait(&sleep_end, &sleep_lock);
    pthread_mutex_unlock(&sleep_lock);
}
void wake_all(std::atomic<uint32_t>&) {
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&sleep_end);
    pthread_mutex_unlock(&sleep_lock);
}
#endif

/* Opens once for each turn; those who wait for the turn after `seen` pass. */
struct alignas(128) Gate {
    std::atomic<uint32_t> turn{0}, sleepers{0};

    void open() {
        /* Sequentially consistent, as in wait: either the sleeper sees the turn or the opener sees the sleeper. */
        turn.fetch_add(1);
        if (sleepers.load()) wake_all(turn);
    }
    void wait(uint32_t seen, int64_t spin_ns, int64_t yield_ns) {
        int64_t start = 0;
        for (;;) {
            for (int i = 0; i < 64; i++) {
                if (turn.load(std::memory_order_acquire) != seen) return;
                if (spin_ns) relax();
            }
            int64_t now = now_ns();
            if (!start) start = now;
            if (now - start < spin_ns) continue;
            if (now - start >= yield_ns) break;
            sched_yield();
        }
        sleepers.fetch_add(1);
        while (turn.load() == seen) sleep_while(turn, seen);
        sleepers.fetch_sub(1);
    }
};

struct Place {
    int cpu, core; /* core: the least CPU that shares it */
};

struct Worker {
    Gate go;
    pthread_t thread;
    int tid, cpu; /* -1: anywhere */
    uint32_t seen;
};

struct Team {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    std::vector<Place> places; /* one for each core first, then the others; filled at the first run */
    std::atomic<int> default_num{0}, wanted_num{0};
    Worker* workers[MAX_THREADS] = {};
    int num_started = 1; /* the caller counts */
    void* scratch[MAX_THREADS] = {};
    int caller_core = -1, placed_num = 0;
    bool closed = false, stop = false;

    /* The run at hand. */
    TeamFn fn = nullptr;
    void* context = nullptr;
    int num = 1;
    int64_t spin_ns = SPIN_NS;
    Work work = {0};
    alignas(128) std::atomic<int> arrived{0};
    Gate barrier;
    alignas(128) std::atomic<int> running{0};
    Gate joined;
};

Team* make_team();
/* Made while the library is loaded: a fork must find the handlers below, whatever other threads are about to run. */
Team* const team = make_team();

int core_of(int cpu) {
    int core = cpu;
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    if (FILE* file = fopen(path, "r")) {
        if (fscanf(file, "%d", &core) != 1) core = cpu;
        fclose(file);
    }
    return core;
}

std::vector<Place> find_places() {
    std::vector<Place> firsts, others;
#if defined(__linux__)
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            if (!CPU_ISSET(cpu, &mask)) continue;
            int core = core_of(cpu);
            bool has_thread = false;
            for (const Place& place : firsts) has_thread |= place.core == core;
            (has_thread ? others : firsts).push_back({cpu, core});
        }
#endif
    firsts.insert(firsts.end(), others.begin(), others.end());
    return firsts;
}

int find_default(const std::vector<Place>& places) {
    int num = 0;
    for (size_t i = 0; i < places.size(); i++) {
        bool first = true;
        for (size_t j = 0; j < i; j++) first &= places[j].core != places[i].core;
        num += first;
    }
    if (places.empty()) num = (int)sysconf(_SC_NPROCESSORS_ONLN);
    /* A spinning team that is bigger than the quota would use it up, and then stand still. */
    long long quota, period;
    if (FILE* file = fopen("/sys/fs/cgroup/cpu.max", "r")) {
        if (fscanf(file, "%lld %lld", &quota, &period) == 2 && period > 0) {
            long long allowed = (quota + period - 1) / period;
            if (allowed < num) num = (int)allowed;
        }
        fclose(file);
    }
    return num < 1 ? 1 : num > MAX_THREADS ? MAX_THREADS : num;
}

void* work_loop(void* argument) {
    Worker* worker = (Worker*)argument;
    for (;;) {
        worker->go.wait(worker->seen, SPIN_NS, 0);
        worker->seen++;
        if (team->stop) return nullptr;
        team->fn(team->context, worker->tid, team->num);
        if (team->running.fetch_sub(1) == 1) team->joined.open();
    }
}

/* At exit: no thread of ours may still run when the library's memory goes. */
void close_team() {
    pthread_mutex_lock(&team->lock);
    team->closed = team->stop = true;
    for (int tid = 1; tid < team->num_started; tid++) team->workers[tid]->go.open();
    for (int tid = 1; tid < team->num_started; tid++) pthread_join(team->workers[tid]->thread, nullptr);
    team->num_started = 1;
    pthread_mutex_unlock(&team->lock);
}

void before_fork() { pthread_mutex_lock(&team->lock); }
void parent_after_fork() { pthread_mutex_unlock(&team->lock); }
/* The child has none of the threads and makes its own when it needs them. The lock was held: no run was under way. */
void child_after_fork() {
    for (int tid = 1; tid < team->num_started; tid++) team->workers[tid]->go.sleepers = 0;
    team->barrier.sleepers = team->joined.sleepers = 0;
    team->num_started = 1;
    team->placed_num = 0;
    pthread_mutex_init(&team->lock, nullptr);
}

Team* make_team() {
    Team* new_team = new Team; /* never deleted: a Python thread may still be in a run while the process ends */
    pthread_atfork(before_fork, parent_after_fork, child_after_fork);
    atexit(close_team);
    return new_team;
}

/* With the lock held. */
void look_around() {
    if (team->default_num) return;
    team->places = find_places();
    team->default_num = find_default(team->places);
}

bool add_scratch(int tid) {
    if (team->scratch[tid]) return true;
#ifdef __SANITIZE_ADDRESS__
    void* memory = aligned_alloc(64, HR_SCRATCH_BYTES); /* with a fence behind it */
    if (!memory) return false;
#else
    void* memory = mmap(nullptr, HR_SCRATCH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
#endif
    team->scratch[tid] = memory;
    return true;
}

/* Starts workers until there are `num` threads, or as many as the system gives. */
void grow(int num) {
    if (team->closed) return;
    sigset_t all, before; /* signals are for the threads of Python */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team->num_started < num && add_scratch(team->num_started)) {
        int tid = team->num_started;
        if (!team->workers[tid]) team->workers[tid] = new Worker;
        Worker* worker = team->workers[tid];
        worker->tid = tid;
        worker->cpu = -1;
        worker->seen = worker->go.turn;
        if (pthread_create(&worker->thread, nullptr, work_loop, worker) != 0) break;
#if defined(__linux__)
        char name[16];
        snprintf(name, sizeof name, "headrace/%d", tid);
        pthread_setname_np(worker->thread, name);
#endif
        team->num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/* Pins each worker to a CPU of its own, first on other cores than the caller's; the caller stays where it is. With more
 * threads than CPUs a worker may run on any of them. */
void place(int num) {
#if defined(__linux__)
    int cpu = sched_getcpu(), core = -1;
    for (const Place& p : team->places)
        if (p.cpu == cpu) core = p.core;
    if (core == team->caller_core && num == team->placed_num) return;
    team->caller_core = core;
    team->placed_num = num;
    std::vector<int> free, shared;
    for (const Place& p : team->places)
        if (p.cpu != cpu) (p.core == core ? shared : free).push_back(p.cpu);
    free.insert(free.end(), shared.begin(), shared.end());
    bool crowded = (int)free.size() < num - 1;
    for (int tid = 1; tid < num; tid++) {
        Worker* worker = team->workers[tid];
        int wanted = crowded ? -1 : free[(size_t)tid - 1];
        if (worker->cpu == wanted) continue;
        cpu_set_t mask;
        CPU_ZERO(&mask);
        for (const Place& p : team->places)
            if (wanted < 0 || p.cpu == wanted) CPU_SET(p.cpu, &mask);
        /* A refusal (a narrower mask since) costs speed alone. */
        if (pthread_setaffinity_np(worker->thread, sizeof mask, &mask) == 0) worker->cpu = wanted;
    }
#else
    (void)num;
#endif
}

}  // namespace

int num_threads() {
    if (team->wanted_num) return team->wanted_num;
    if (!team->default_num) {
        pthread_mutex_lock(&team->lock);
        look_around();
        pthread_mutex_unlock(&team->lock);
    }
    return team->default_num;
}

void set_num_threads(int num) { team->wanted_num = num; }

Work* team_work() { return &team->work; }
void* team_scratch(int tid) { return team->scratch[tid]; }

void team_barrier(int num) {
    if (num == 1) {
        team->work.counter = 0;
        return;
    }
    uint32_t seen = team->barrier.turn.load(std::memory_order_relaxed);
    if (team->arrived.fetch_add(1) == num - 1) {
        team->arrived.store(0, std::memory_order_relaxed);
        team->work.counter = 0;
        team->barrier.open();
    } else {
        team->barrier.wait(seen, team->spin_ns, YIELD_NS);
    }
}

int team_run(int num, TeamFn fn, void* context) {
    if (num <= 0) num = num_threads();
    if (num > MAX_THREADS) num = MAX_THREADS;
    pthread_mutex_lock(&team->lock);
    look_around();
    if (!add_scratch(0)) abort(); /* 8 MiB of address space */
    if (num > team->num_started) grow(num);
    if (num > team->num_started) num = team->num_started;
    team->fn = fn;
    team->context = context;
    team->num = num;
    team->work.counter = 0;
    if (num > 1) {
        place(num);
        /* Where threads outnumber CPUs, a spinning one keeps the one it waits for from running. */
        team->spin_ns = !team->places.empty() && num > (int)team->places.size() ? 0 : SPIN_NS;
        team->running.store(num - 1);
        uint32_t seen = team->joined.turn;
        for (int tid = 1; tid < num; tid++) team->workers[tid]->go.open();
        fn(context, 0, num);
        team->joined.wait(seen, team->spin_ns, YIELD_NS);
    } else {
        fn(context, 0, 1);
    }
    pthread_mutex_unlock(&team->lock);
    return num;
}

}  // namespace hr
