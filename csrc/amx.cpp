/* Whether the tile instructions of AMX run here: the processor's and the system's word for it is not enough. */
#include "include/dispatch.h"

#if defined(__linux__)
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace hr {

namespace {

/* A product of two tiles of ones: 16 rows of 16 sums of 64. */
bool multiplies() {
    alignas(64) uint8_t shapes[64] = {1};
    alignas(64) int8_t ones[16][64];
    alignas(64) int32_t sums[16][16];
    for (int i = 0; i < 3; i++) shapes[16 + 2 * i] = 64, shapes[48 + i] = 16;
    memset(ones, 1, sizeof ones);
    memset(sums, 0, sizeof sums);
    __asm__ volatile(
        "ldtilecfg %0\n\t"
        "tilezero %%tmm0\n\t"
        "tileloadd (%1,%3,1), %%tmm1\n\t"
        "tileloadd (%1,%3,1), %%tmm2\n\t"
        "tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"
        "tilestored %%tmm0, (%2,%3,1)\n\t"
        "tilerelease" ::"m"(shapes),
        "r"(ones), "r"(sums), "r"((int64_t)64)
        : "memory");
    for (int i = 0; i < 256; i++)
        if (sums[i / 16][i % 16] != 64) return false;
    return true;
}

}  // namespace

bool amx_runs() {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0) return false;
    /* In a child, whose end by SIGILL is the answer. A plain fork: handlers that libraries have for one are theirs, and
     * what the child does needs none. */
    int ends[2];
    if (pipe(ends) != 0) return false;
    const long child = syscall(SYS_fork);
    if (child == 0) {
        const char answer = multiplies();
        const bool told = write(ends[1], &answer, 1) == 1;
        syscall(SYS_exit_group, told ? 0 : 1);
    }
    close(ends[1]);
    char answer = 0;
    const bool heard = child > 0 && read(ends[0], &answer, 1) == 1;
    close(ends[0]);
    if (child > 0) waitpid((pid_t)child, nullptr, 0);
    return heard && answer;
}

}  // namespace hr
#else
bool hr::amx_runs() { return false; }
#endif
