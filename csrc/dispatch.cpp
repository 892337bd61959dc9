#include "include/dispatch.h"

#include <stdexcept>

#include "isas.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define HR_DECLARE_TABLE(isa) extern "C" const HrKernelTable* hr_kernels_##isa(void);
#define X HR_DECLARE_TABLE
HR_ISAS(X)
#undef X

namespace hr {

uint64_t decide(const CpuWords& words) {
    auto all = [](uint32_t word, uint32_t wanted) { return (word & wanted) == wanted; };
    auto bit = [](int n) { return (uint32_t)1 << n; };
    /* XCR0: which registers the system saves. 1 SSE, 2 AVX, 5-7 AVX-512, 17-18 AMX. Without OSXSAVE it says nothing. */
    bool xsave = all(words.leaf1_ecx, bit(27));
    bool os_avx = xsave && (words.xcr0 & 0x6) == 0x6;
    bool os_avx512 = os_avx && (words.xcr0 & 0xe0) == 0xe0;
    bool os_amx = xsave && (words.xcr0 & 0x60000) == 0x60000;

    /* AArch64: the system's word, in the places of Linux's <asm/hwcap.h>, which other processors' systems lack. */
    uint64_t bits = 0;
    if (words.hwcap >> 20 & 1) bits |= HR_CPU_DOTPROD;
    if ((bits & HR_CPU_DOTPROD) && words.hwcap2 >> 13 & 1) bits |= HR_CPU_I8MM;

    if (!os_avx || !all(words.leaf1_ecx, bit(28) | bit(12) | bit(29)) || !all(words.leaf7_ebx, bit(5))) return bits;
    bits |= HR_CPU_AVX2;
    if (os_avx512 && all(words.leaf7_ebx, bit(16) | bit(17) | bit(30) | bit(31))) bits |= HR_CPU_AVX512;
    if ((bits & HR_CPU_AVX512) && all(words.leaf7_ecx, bit(11))) bits |= HR_CPU_VNNI512;
    if (all(words.leaf7_1_eax, bit(4))) bits |= HR_CPU_AVX_VNNI;
    if (os_amx && all(words.leaf7_edx, bit(24) | bit(25))) bits |= HR_CPU_AMX_INT8;
    return bits;
}

CpuWords read_cpu() {
    CpuWords words = {};
#if defined(__x86_64__)
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) words.leaf1_ecx = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        words.leaf7_ebx = b, words.leaf7_ecx = c, words.leaf7_edx = d;
        uint32_t subleaves = a;
        if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words.leaf7_1_eax = a;
    }
    if (words.leaf1_ecx >> 27 & 1) {
        __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        words.xcr0 = (uint64_t)d << 32 | a;
    }
#elif defined(__aarch64__) && defined(__linux__)
    words.hwcap = getauxval(AT_HWCAP), words.hwcap2 = getauxval(AT_HWCAP2);
#endif
    return words;
}

uint64_t features() {
    static const uint64_t bits = [] {
        uint64_t said = decide(read_cpu());
#if defined(__x86_64__)
        if (said & HR_CPU_AMX_INT8 && !amx_runs()) said &= ~(uint64_t)HR_CPU_AMX_INT8;
#endif
        return said;
    }();
    return bits;
}

static const std::vector<const HrKernelTable*>& built() {
#define X(isa) hr_kernels_##isa(),
    static const std::vector<const HrKernelTable*> all = {HR_ISAS(X)};
#undef X
    return all;
}

const std::vector<const HrKernelTable*>& tables() {
    static const std::vector<const HrKernelTable*> able = [] {
        std::vector<const HrKernelTable*> runnable;
        for (const HrKernelTable* table : built())
            if ((table->needs & ~features()) == 0) runnable.push_back(table);
        return runnable;
    }();
    return able;
}

static std::string& ceiling() {
    static std::string isa;
    return isa;
}

static void check(const std::string& isa) {
    std::string known;
    for (const HrKernelTable* table : tables()) {
        if (isa == table->isa) return;
        known += (known.empty() ? "" : ", ") + std::string(table->isa);
    }
    for (const HrKernelTable* table : built())
        if (isa == table->isa) throw std::invalid_argument("this machine can not run " + isa + "; it can run " + known);
    throw std::invalid_argument("no ISA is called '" + isa + "'; this machine can run " + known);
}

Kernels choose(const std::string& isa) {
    const std::string& top = isa.empty() ? ceiling() : isa;
    if (!top.empty()) check(top);
    Kernels chosen;
    for (int op = 0; op < HR_NUM_OPS; op++) chosen.op[op] = nullptr, chosen.isa[op] = "";
    for (const HrKernelTable* table : tables()) {
        for (int op = 0; op < HR_NUM_OPS; op++)
            if (table->op[op]) chosen.op[op] = table->op[op], chosen.isa[op] = table->isa;
        if (top == table->isa) break;
    }
    return chosen;
}

void set_isa(const std::string& isa) {
    if (!isa.empty()) check(isa);
    ceiling() = isa;
}

}  // namespace hr
