#include "include/ranks.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

#include "include/kernels.h"
#include "include/team.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace hr {

/* Two slots in turn: a rank that writes the one has passed the barrier behind which nobody reads it any more. */
struct SharedGroup {
    alignas(128) std::atomic<uint32_t> arrived;
    alignas(128) std::atomic<uint32_t> turn;
    std::atomic<uint32_t> sleepers;
    alignas(128) std::atomic<uint32_t> fault;
    /* Which gather of which call each rank is at, by slot. */
    struct alignas(128) Stamp {
        std::atomic<uint64_t> call, gather;
    } stamps[2][MAX_RANKS];
};

namespace {

/* As the team's (team.cpp): spin, let others run, sleep. */
const int64_t SPIN_NS = 200000, YIELD_NS = 1000000;
/* A sleeper looks up so often whether the group is broken. */
const int64_t LOOK_NS = 50000000;
const size_t PAGE = 4096;

size_t header_bytes() { return (sizeof(SharedGroup) + PAGE - 1) / PAGE * PAGE; }

/* Futexes of memory that processes share: not the private ones of the team. */
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    timespec most = {0, (long)LOOK_NS};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0);
#else
    (void)word, (void)seen;
    usleep(100);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

size_t Ranks::bytes(int64_t slot_bytes) { return header_bytes() + 2 * (size_t)slot_bytes; }

Ranks::Ranks(int fd, int rank, int world, int64_t slot_bytes, int64_t timeout_ns, bool spins)
    : rank_(rank), world_(world), slot_bytes_(slot_bytes), timeout_ns_(timeout_ns), spin_ns_(spins ? SPIN_NS : 0) {
    check();
    if (timeout_ns < 1) throw std::invalid_argument("the timeout must be above 0");
    size_ = bytes(slot_bytes);
    struct stat facts;
    if (fstat(fd, &facts) != 0 || (size_t)facts.st_size < size_)
        throw std::invalid_argument("the file is shorter than the group's memory");
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + strerror(errno));
    shared_ = (SharedGroup*)memory;
}

Ranks::Ranks(int rank, int world, int64_t slot_bytes, Exchange exchange)
    : rank_(rank), world_(world), slot_bytes_(slot_bytes), timeout_ns_(0), spin_ns_(0), exchange_(std::move(exchange)) {
    check();
    /* Pages are taken when a gather first writes them. */
    size_ = header_bytes() + (size_t)world * (size_t)(slot_bytes + (int64_t)PAGE);
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + strerror(errno));
    shared_ = (SharedGroup*)memory;
}

void Ranks::check() const {
    if (world_ < 1 || world_ > MAX_RANKS || rank_ < 0 || rank_ >= world_)
        throw std::invalid_argument("a group has 1 ... " + std::to_string(MAX_RANKS) + " ranks, numbered from 0");
    if (slot_bytes_ < (int64_t)PAGE || slot_bytes_ % (int64_t)PAGE)
        throw std::invalid_argument("slot_bytes must be whole pages");
}

Ranks::~Ranks() { munmap((void*)shared_, size_); }

void Ranks::begin(uint64_t id) { call_ = id, of_call_ = 0; }

Fault Ranks::fault() const { return (Fault)shared_->fault.load(); }

void Ranks::fail(Fault why) {
    uint32_t none = SOUND;
    shared_->fault.compare_exchange_strong(none, why);
    wake_all(shared_->turn);
}

void Ranks::break_group() { fail(LOST); }

char* Ranks::slot(int64_t gather) const {
    return (char*)shared_ + header_bytes() + (size_t)(gather & 1) * (size_t)slot_bytes_;
}

char* Ranks::part(int rank) const {
    return (char*)shared_ + header_bytes() + (size_t)rank * (size_t)(slot_bytes_ + (int64_t)PAGE);
}

bool Ranks::exchange(const int64_t* sizes) {
    const uint64_t gather = of_call_++;
    auto stamp = [&](int r, uint64_t* to) { to[0] = call_, to[1] = gather, to[2] = (uint64_t)sizes[r]; };
    if (shared_->fault.load(std::memory_order_relaxed)) return false;
    stamp(rank_, (uint64_t*)part(rank_));
    if (!exchange_(sizes[rank_] + STAMP_BYTES)) {
        fail(LOST);
        return false;
    }
    for (int r = 0; r < world_; r++) {
        uint64_t expected[3];
        stamp(r, expected);
        if (memcmp(part(r), expected, sizeof expected)) {
            fail(OUT_OF_STEP);
            return false;
        }
    }
    return true;
}

bool Ranks::wait(uint32_t seen) {
    int64_t start = 0;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (shared_->turn.load(std::memory_order_acquire) != seen) return true;
            if (spin_ns_) relax();
        }
        int64_t now = now_ns();
        if (!start) start = now;
        if (shared_->fault.load(std::memory_order_relaxed)) return false;
        if (now - start < spin_ns_) continue;
        if (now - start < YIELD_NS) {
            sched_yield();
            continue;
        }
        if (now - start > timeout_ns_) {
            fail(TIMEOUT);
            return false;
        }
        /* Sequentially consistent, as in meet: either the sleeper sees the turn or the last one sees the sleeper. */
        shared_->sleepers.fetch_add(1);
        if (shared_->turn.load() == seen) sleep_while(shared_->turn, seen);
        shared_->sleepers.fetch_sub(1);
    }
}

bool Ranks::meet() {
    SharedGroup& shared = *shared_;
    const uint64_t gather = of_call_++;
    SharedGroup::Stamp* stamps = shared.stamps[gathers_ & 1];
    if (shared.fault.load(std::memory_order_relaxed)) return false;
    stamps[rank_].call.store(call_, std::memory_order_relaxed);
    stamps[rank_].gather.store(gather, std::memory_order_relaxed);
    const uint32_t seen = shared.turn.load(std::memory_order_relaxed);
    if ((int)shared.arrived.fetch_add(1) == world_ - 1) {
        shared.arrived.store(0, std::memory_order_relaxed);
        shared.turn.fetch_add(1);
        if (shared.sleepers.load()) wake_all(shared.turn);
    } else if (!wait(seen)) {
        return false;
    }
    for (int i = 0; i < world_; i++)
        if (stamps[i].call.load(std::memory_order_relaxed) != call_ ||
            stamps[i].gather.load(std::memory_order_relaxed) != gather) {
            fail(OUT_OF_STEP);
            return false;
        }
    return true;
}

}  // namespace hr

/* The operator. It is no ISA's: it moves numbers and computes none. */
namespace hr_scalar {

namespace {

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Rows first, first + 1, ... of `num`, for this thread. */
template <class F>
void each_row(const HrTask* task, int64_t num, F f) {
    for (int64_t row = task->tid; row < num; row += task->num_threads) f(row);
}

struct Span {
    int64_t rank, from, at, num;
};

/* A row of floats, or of codes with their scales and sums. */
struct Row {
    float* x;
    int8_t* q;
    float* scales;
    int32_t* sums;

    static Row at(char* place, bool floats, int64_t codes, int64_t groups) {
        if (floats) return {(float*)place, nullptr, nullptr, nullptr};
        return {nullptr, (int8_t*)place, (float*)(place + codes), (int32_t*)(place + codes + 4 * groups)};
    }
};

/* Copies columns from, ... of a row to columns at, ... of another. */
void copy(const Row& row, int64_t from, Row to, int64_t at, int64_t num, int64_t group) {
    if (row.x) {
        memcpy(to.x + at, row.x + from, 4 * (size_t)num);
        return;
    }
    const size_t of_groups = 4 * (size_t)((num + group - 1) / group);
    memcpy(to.q + at, row.q + from, (size_t)num);
    memcpy(to.scales + at / group, row.scales + from / group, of_groups);
    memcpy(to.sums + at / group, row.sums + from / group, of_groups);
}

Row own_row(const HrArgs_gather* a, int64_t row) {
    if (a->x) return {(float*)a->x + row * a->ld_x, nullptr, nullptr, nullptr};
    return {nullptr, (int8_t*)a->q + row * a->ld_q, (float*)a->scales + row * a->ld_s, (int32_t*)a->sums + row * a->ld_s};
}

Row row_of_all(const HrArgs_gather* a, int64_t row) {
    if (a->x) return {a->out + row * a->ld_out, nullptr, nullptr, nullptr};
    int8_t* q = a->to_q + row * a->ld_to_q;
    memset(q + a->width, 0, (size_t)(a->ld_to_q - a->width));
    return {nullptr, q, a->to_scales + row * a->ld_to_s, a->to_sums + row * a->ld_to_s};
}

/* Each rank has a part of its own columns alone, which the exchange moves. */
void exchange(const HrArgs_gather* a, HrTask* task, hr::Ranks& ranks, int64_t first, int64_t num) {
    const Span* spans = (const Span*)a->spans;
    const int64_t group = a->group;
    int64_t columns[hr::MAX_RANKS] = {0}, codes[hr::MAX_RANKS], groups[hr::MAX_RANKS], bytes[hr::MAX_RANKS];
    for (int64_t s = 0; s < a->count; s++) columns[spans[s].rank] += spans[s].num;
    for (int r = 0; r < ranks.world(); r++) {
        codes[r] = rounded_up(columns[r], 4), groups[r] = (columns[r] + group - 1) / group;
        bytes[r] = rounded_up(a->x ? 4 * columns[r] : codes[r] + 8 * groups[r], 4);
    }
    auto row_of = [&](int64_t r, int64_t i) {
        return Row::at(ranks.part((int)r) + hr::Ranks::STAMP_BYTES + i * bytes[r], a->x, codes[r], groups[r]);
    };
    each_row(task, num, [&](int64_t i) {
        int64_t at = 0;
        for (int64_t s = 0; s < a->count; s++)
            if (spans[s].rank == ranks.rank()) {
                copy(own_row(a, first + i), spans[s].from, row_of(ranks.rank(), i), at, spans[s].num, group);
                at += spans[s].num;
            }
    });
    hr::team_barrier(task->num_threads);
    if (task->tid == 0) {
        int64_t sizes[hr::MAX_RANKS];
        for (int r = 0; r < ranks.world(); r++) sizes[r] = num * bytes[r];
        ranks.exchange(sizes);
    }
    hr::team_barrier(task->num_threads);
    each_row(task, num, [&](int64_t i) {
        const Row to = row_of_all(a, first + i);
        int64_t from[hr::MAX_RANKS] = {0};
        for (int64_t s = 0; s < a->count; s++) {
            copy(row_of(spans[s].rank, i), from[spans[s].rank], to, spans[s].at, spans[s].num, group);
            from[spans[s].rank] += spans[s].num;
        }
    });
    /* Nobody writes the next rows into the part before all have read these. */
    hr::team_barrier(task->num_threads);
}

}  // namespace

void gather(const HrArgs_gather* a, HrTask* task) {
    hr::Ranks& ranks = *(hr::Ranks*)a->ranks;
    const Span* spans = (const Span*)a->spans;
    const int64_t rows = task->dims[a->dim], group = a->group;
    const int64_t groups = a->x ? 0 : (a->width + group - 1) / group, codes = rounded_up(a->width, 4);
    const int64_t row_bytes = rounded_up(a->x ? 4 * a->width : codes + 8 * groups, 64);
    const int64_t most = ranks.slot_bytes() / row_bytes;
    /* The rows that this rank has, which begin at 0 in what it gives. */
    const int64_t begin = a->from ? *a->from : 0, end = a->from ? begin + task->dims[HR_DIM_OWN_PAIRS] : rows;
    /* A wider row than the slot is refused when the tape is made. */
    /* The count of gathers is tid 0's; the others read it here alone, before the first barrier. */
    int64_t turn = ranks.num_gathers();
    for (int64_t first = 0; first < rows && most > 0; first += most, turn++) {
        const int64_t num = rows - first < most ? rows - first : most;
        if (ranks.exchanges()) {
            exchange(a, task, ranks, first, num);
            continue;
        }
        char* slot = ranks.slot(turn);
        each_row(task, num, [&](int64_t i) {
            if (first + i < begin || first + i >= end) return;
            const Row to = Row::at(slot + i * row_bytes, a->x, codes, groups), own = own_row(a, first + i - begin);
            for (int64_t s = 0; s < a->count; s++)
                if (spans[s].rank == ranks.rank()) copy(own, spans[s].from, to, spans[s].at, spans[s].num, group);
        });
        hr::team_barrier(task->num_threads);
        if (task->tid == 0) ranks.meet();
        hr::team_barrier(task->num_threads);
        each_row(task, num, [&](int64_t i) {
            copy(Row::at(slot + i * row_bytes, a->x, codes, groups), 0, row_of_all(a, first + i), 0, a->width, group);
        });
        /* Who is here first writes the other slot, which nobody reads any more. */
        if (task->tid == 0) ranks.next();
    }
}

}  // namespace hr_scalar
