#include "include/limits.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "include/dispatch.h"
#include "include/team.h"
#include "isas.h"

#define X(isa)                     \
    namespace hr_##isa {           \
    extern const HrProbe probe;    \
    }
HR_ISAS(X)
#undef X

namespace hr {

namespace {

enum { PIECES = 9 };

struct Reading {
    const HrProbe* probe;
    const char* data;
    size_t size;
    int passes;
    std::vector<uint64_t> sums;
};

void read_part(void* context, int tid, int num) {
    Reading* r = (Reading*)context;
    size_t part = r->size / (size_t)num / 4096 * 4096;
    for (int i = 0; i < r->passes; i++) r->sums[(size_t)tid * 16] += r->probe->read(r->data + part * (size_t)tid, part);
}

void touch_part(void* context, int tid, int num) {
    Reading* r = (Reading*)context;
    size_t part = r->size / (size_t)num / 4096 * 4096;
    memset((char*)r->data + part * (size_t)tid, tid + 1, part);
}

struct Loop {
    void (*body)(int64_t turns);
    int64_t turns;
};

void loop_part(void* context, int, int) {
    Loop* loop = (Loop*)context;
    loop->body(loop->turns);
}

/* Seconds that fn takes on `num` threads. */
double timed(int num, TeamFn fn, void* context) {
    int64_t start = now_ns();
    team_run(num, fn, context);
    return (double)(now_ns() - start) * 1e-9;
}

Limit summary(const char* isa, const char* what, std::vector<double> rates, int64_t bytes) {
    std::sort(rates.begin(), rates.end());
    return {isa, what, rates[rates.size() / 2], rates.front(), rates.back(), bytes};
}

Limit measure_loop(const char* isa, const char* what, void (*body)(int64_t), double ops, int num, double seconds) {
    Loop loop = {body, 1000};
    double took = timed(num, loop_part, &loop);
    while (took < 1e-3) loop.turns *= 4, took = timed(num, loop_part, &loop);
    loop.turns = (int64_t)((double)loop.turns * (seconds / PIECES / took)) + 1;
    timed(num, loop_part, &loop);
    std::vector<double> rates;
    for (int i = 0; i < PIECES; i++) rates.push_back(ops * (double)loop.turns * num / timed(num, loop_part, &loop));
    return summary(isa, what, rates, 0);
}

}  // namespace

std::vector<Limit> measure_limits(int num, double seconds, int64_t most_bytes) {
    num = team_run(num, [](void*, int, int) {}, nullptr); /* how many there really are */
    std::vector<Limit> limits;
    std::vector<const HrProbe*> probes;
#define X(isa) probes.push_back(&hr_##isa::probe);
    HR_ISAS(X)
#undef X
    const auto runs = [](const HrProbe* probe) {
        for (const HrKernelTable* table : tables())
            if (!strcmp(table->isa, probe->isa)) return true;
        return false;
    };
    probes.erase(std::remove_if(probes.begin(), probes.end(), [&](const HrProbe* probe) { return !runs(probe); }), probes.end());

    int64_t free_bytes = (int64_t)sysconf(_SC_PAGESIZE) * sysconf(_SC_PHYS_PAGES) / 2;
#if defined(_SC_AVPHYS_PAGES)
    free_bytes = (int64_t)sysconf(_SC_PAGESIZE) * sysconf(_SC_AVPHYS_PAGES);
#endif
    size_t size = (size_t)std::min<int64_t>(most_bytes, free_bytes / 4) / 4096 * 4096;
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data != MAP_FAILED) {
#if defined(MADV_HUGEPAGE)
        madvise(data, size, MADV_HUGEPAGE); /* the limit is that of memory, not of the address cache */
#endif
        Reading reading = {nullptr, (const char*)data, size, 1, std::vector<uint64_t>((size_t)num * 16)};
        team_run(num, touch_part, &reading);
        for (const HrProbe* probe : probes) {
            if (!probe->read) continue;
            reading.probe = probe;
            double once = timed(num, read_part, &reading);
            reading.passes = std::max(1, (int)(seconds / PIECES / once));
            std::vector<double> rates;
            double bytes = (double)(size / (size_t)num / 4096 * 4096) * num * reading.passes;
            for (int i = 0; i < PIECES; i++) rates.push_back(bytes / timed(num, read_part, &reading));
            limits.push_back(summary(probe->isa, "read", rates, (int64_t)size));
            reading.passes = 1;
        }
        munmap(data, size);
    }
    for (const HrProbe* probe : probes) {
        if (probe->int8) limits.push_back(measure_loop(probe->isa, "int8", probe->int8, probe->int8_ops, num, seconds));
        if (probe->f32) limits.push_back(measure_loop(probe->isa, "f32", probe->f32, probe->f32_ops, num, seconds));
    }
    return limits;
}

}  // namespace hr
