/* The binding: lists, numbers and bytes in, native calls out. Checks names and sizes; pointers are not checked. */
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <map>
#include <stdexcept>

#include "include/dispatch.h"
#include "include/limits.h"
#include "include/ranks.h"
#include "include/tape.h"
#include "include/team.h"
#include "isa/k_blocks.h"

namespace nb = nanobind;
using std::string;
using std::vector;

namespace {

/* Releases the GIL. Python before 3.14 unwinds a daemon thread that takes the GIL again while the interpreter ends, and C++
 * answers with std::terminate; here such a thread waits for ever instead, as in later versions. */
struct WithoutGil {
    PyThreadState* state = PyEval_SaveThread();
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state);
        } catch (...) {
            for (;;) pause();
        }
    }
};
typedef nb::call_guard<WithoutGil> NoGil;

const char* const op_names[] = {
#define HR_NAME(op) #op,
    HR_OPS(HR_NAME)
#undef HR_NAME
};

nb::dict schema() {
    nb::dict ops;
    nb::list fields;
#define HR_KIND_P(type, name) fields.append(nb::make_tuple(#name, "p"));
#define HR_KIND_I(name) fields.append(nb::make_tuple(#name, "i"));
#define HR_KIND_F(name) fields.append(nb::make_tuple(#name, "f"));
#define HR_SCHEMA(op)                                       \
    fields = nb::list();                                    \
    HR_FIELDS_##op(HR_KIND_P, HR_KIND_I, HR_KIND_F) ops[#op] = fields;
    HR_OPS(HR_SCHEMA)
    return ops;
}

vector<string> isas() {
    vector<string> names;
    for (const HrKernelTable* table : hr::tables()) names.push_back(table->isa);
    return names;
}

std::map<string, bool> named(uint64_t bits) {
    return {{"avx2", bits & HR_CPU_AVX2},         {"avx512", bits & HR_CPU_AVX512},
            {"avx512_vnni", bits & HR_CPU_VNNI512}, {"avx_vnni", bits & HR_CPU_AVX_VNNI},
            {"amx_int8", bits & HR_CPU_AMX_INT8},   {"dotprod", bits & HR_CPU_DOTPROD},
            {"i8mm", bits & HR_CPU_I8MM}};
}

std::map<string, bool> decide(uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
                              uint32_t leaf7_1_eax, uint64_t xcr0, uint64_t hwcap, uint64_t hwcap2) {
    return named(hr::decide({leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax, xcr0, hwcap, hwcap2}));
}

std::map<string, string> served(const string& isa) {
    hr::Kernels kernels = hr::choose(isa);
    std::map<string, string> isa_of;
    for (int op = 0; op < HR_NUM_OPS; op++) isa_of[op_names[op]] = kernels.isa[op];
    return isa_of;
}

int checked_threads(int64_t num) {
    if (num < 0 || num > hr::MAX_THREADS)
        throw std::invalid_argument("num_threads must be 0 (the default) ... " + std::to_string(hr::MAX_THREADS));
    return (int)num;
}

int op_of(const string& name) {
    for (int op = 0; op < HR_NUM_OPS; op++)
        if (name == op_names[op]) return op;
    throw std::invalid_argument("no operator is called '" + name + "'");
}

int64_t add(hr::Tape& tape, const string& op, nb::bytes args) { return tape.add(op_of(op), args.data(), args.size()); }

void set_dims(hr::Tape& tape, const vector<int64_t>& dims) {
    if (dims.size() != HR_DIM_FREE) throw std::invalid_argument("dims are three: rows, sequences, logits");
    for (size_t i = 0; i < dims.size(); i++)
        if (dims[i] < 0) throw std::invalid_argument("dims must not be negative");
    for (size_t i = 0; i < dims.size(); i++) tape.dims()[i] = dims[i];
}

void run_range(hr::Tape& tape, int64_t first, int64_t last, const vector<int64_t>& dims, int64_t num_threads) {
    if (first < 0 || last < first || last > tape.size())
        throw std::invalid_argument("records " + std::to_string(first) + " ... " + std::to_string(last) +
                                    " are not on a tape of " + std::to_string(tape.size()));
    int num = checked_threads(num_threads);
    set_dims(tape, dims);
    if (first < last) tape.run(first, last, num, nullptr);
}

void run(hr::Tape& tape, const vector<int64_t>& dims, int64_t num_threads) {
    run_range(tape, 0, tape.size(), dims, num_threads);
}

vector<int64_t> profile(hr::Tape& tape, const vector<int64_t>& dims, int64_t num_threads) {
    int num = checked_threads(num_threads);
    set_dims(tape, dims);
    vector<int64_t> ns((size_t)tape.size());
    if (!ns.empty()) tape.run(0, tape.size(), num, ns.data());
    return ns;
}

const HrFormat& format_of(const string& name) {
    if (name == "i2") return hr_format_i2;
    if (name == "i3") return hr_format_i3;
    if (name == "i4") return hr_format_i4;
    if (name == "i5") return hr_format_i5;
    if (name == "i6") return hr_format_i6;
    if (name == "i8") return hr_format_i8;
    if (name == "f8") return hr_format_f8;
    if (name == "k") return hr_format_k;
    if (name == "f") return hr_format_f;
    throw std::invalid_argument("no format is called '" + name + "', expected i2, i3, i4, i5, i6, i8, f8, k or f");
}

struct Packing {
    const HrFormat* format;
    const char* codes;
    const float *d, *m;
    int64_t num_in, group, flag, first, last, num_out, row_bytes, scales;
    void* packed;
};

void pack_panels(void* context, int, int) {
    Packing& p = *(Packing*)context;
    int64_t panel = p.format->panel;
    for (;;) {
        int64_t first = p.first + __atomic_fetch_add(&hr::team_work()->counter, 1, __ATOMIC_RELAXED) * panel;
        if (first >= p.last) return;
        int64_t last = first + panel < p.last ? first + panel : p.last, offset = first - p.first;
        p.format->pack(p.codes + offset * p.row_bytes, p.d ? p.d + offset * p.scales : nullptr,
                       p.m ? p.m + offset * p.scales : nullptr, p.num_in, p.group, p.flag, first, last, p.num_out,
                       p.packed);
    }
}

void pack(const string& name, uintptr_t codes, uintptr_t d, uintptr_t m, int64_t num_in, int64_t group, int64_t flag,
          int64_t first, int64_t last, int64_t num_out, uintptr_t packed) {
    const HrFormat& format = format_of(name);
    if (first < 0 || last < first || last > num_out || first % format.panel || num_in < 1)
        throw std::invalid_argument("rows must be first ... last - 1 of num_out, first a multiple of " +
                                    std::to_string(format.panel));
    if (name != "f" && group < 1) throw std::invalid_argument("group must be 1 or more");
    if ((name == "i3" || name == "i5") && group % 16) throw std::invalid_argument("groups of i3 and i5 must be multiples of 16");
    if (name == "k" && (num_in % HR_K_BLOCK || flag < HR_K_Q2 || flag > HR_K_Q6))
        throw std::invalid_argument("K-quants have rows of whole blocks, and types from 12 to 16");
    int64_t scales = (name == "i8" || name == "f8") && flag == 0 ? 1 : name == "f" || name == "k" ? 0 : (num_in + group - 1) / group;
    Packing packing = {&format, (const char*)codes, (const float*)d, (const float*)m, num_in, group, flag,
                       first, last, num_out, format.row_bytes(num_in, flag), scales, (void*)packed};
    /* Below a quarter of a million weights waking the other threads takes longer than packing. */
    hr::team_run((last - first) * num_in < 1 << 18 ? 1 : 0, pack_panels, &packing);
}

void unpack_row(const string& name, uintptr_t packed, int64_t num_out, int64_t num_in, int64_t group, int64_t flag,
                int64_t row, uintptr_t out) {
    if (row < 0 || row >= num_out) throw std::invalid_argument("row must be 0 ... num_out - 1");
    format_of(name).unpack_row((const void*)packed, num_out, num_in, group, flag, row, (float*)out);
}

nb::list limits(int64_t num_threads, double seconds, int64_t most_bytes) {
    int num = checked_threads(num_threads);
    if (!(seconds > 0 && seconds <= 60)) throw std::invalid_argument("seconds must be above 0 and at most 60");
    if (most_bytes < 1 << 20) throw std::invalid_argument("most_bytes must be at least a MiB");
    vector<hr::Limit> measured;
    {
        WithoutGil no_gil;
        measured = hr::measure_limits(num, seconds, most_bytes);
    }
    nb::list rows;
    for (const hr::Limit& limit : measured) {
        nb::dict row;
        row["what"] = limit.what, row["isa"] = limit.isa, row["rate"] = limit.rate;
        row["least"] = limit.least, row["most"] = limit.most, row["bytes"] = limit.bytes;
        rows.append(row);
    }
    return rows;
}

}  // namespace

NB_MODULE(_native, module) {
    using namespace nb::literals;
    module.doc() = "The native core: operators by ISA, the tape, the thread team. See backends/native.py.";
    /* A failed test or an interrupted program holds objects at exit; they are no leaks. */
    nb::set_leak_warnings(false);
    module.def("schema", schema);
    module.def("isas", isas);
    module.def("features", [] { return named(hr::features()); });
    module.def("decide", decide, "leaf1_ecx"_a, "leaf7_ebx"_a, "leaf7_ecx"_a, "leaf7_edx"_a, "leaf7_1_eax"_a, "xcr0"_a,
               "hwcap"_a, "hwcap2"_a);
    module.def("served", served, "isa"_a = "");
    module.def("set_isa", hr::set_isa, "isa"_a);
    module.def("num_threads", hr::num_threads);
    module.def("set_num_threads", [](int64_t num) { hr::set_num_threads(checked_threads(num)); }, "num"_a);

    nb::class_<hr::Tape>(module, "Tape")
        .def("__init__", [](hr::Tape* self, const string& isa) { new (self) hr::Tape(hr::choose(isa)); }, "isa"_a = "")
        .def("add", add, "op"_a, "args"_a)
        .def("run", run, "dims"_a, "num_threads"_a = 0, NoGil())
        .def("run_range", run_range, "first"_a, "last"_a, "dims"_a, "num_threads"_a = 0, NoGil())
        .def("profile", profile, "dims"_a, "num_threads"_a = 0, NoGil())
        .def("dims", [](hr::Tape& tape) { return vector<int64_t>(tape.dims(), tape.dims() + tape.dims_used()); })
        .def("ops", [](hr::Tape& tape) {
            vector<string> names;
            for (int64_t i = 0; i < tape.size(); i++) names.push_back(op_names[tape.op(i)]);
            return names;
        })
        .def("__len__", &hr::Tape::size);

    nb::class_<hr::Ranks>(module, "Ranks")
        .def("__init__", [](hr::Ranks* self, int fd, int rank, int world, int64_t slot_bytes, double timeout, bool spins) {
            if (!(timeout > 0 && timeout < 1e9)) throw std::invalid_argument("timeout must be above 0 and below 1e9 seconds");
            new (self) hr::Ranks(fd, rank, world, slot_bytes, (int64_t)(timeout * 1e9), spins);
        }, "fd"_a, "rank"_a, "world"_a, "slot_bytes"_a, "timeout"_a, "spins"_a)
        .def_static("exchanging", [](int rank, int world, int64_t slot_bytes, nb::callable exchange) {
            return new hr::Ranks(rank, world, slot_bytes, [exchange](int64_t bytes) {
                nb::gil_scoped_acquire gil;
                try {
                    return nb::cast<bool>(exchange(bytes));
                } catch (nb::python_error& error) {
                    error.discard_as_unraisable("the exchange of the ranks");
                    return false;
                }
            });
        }, "rank"_a, "world"_a, "slot_bytes"_a, "exchange"_a, nb::rv_policy::take_ownership)
        .def("part", [](hr::Ranks& ranks, int rank) {
            if (!ranks.exchanges() || rank < 0 || rank >= ranks.world()) throw std::invalid_argument("no such part");
            return nb::steal(PyMemoryView_FromMemory(ranks.part(rank), (Py_ssize_t)ranks.part_bytes(), PyBUF_WRITE));
        }, "rank"_a, nb::keep_alive<0, 1>())
        .def("address", [](hr::Ranks& ranks) { return (uintptr_t)&ranks; })
        .def("begin", &hr::Ranks::begin, "call_id"_a)
        .def("fault", [](hr::Ranks& ranks) {
            const char* const faults[] = {"", "timeout", "out of step", "lost"};
            return string(faults[ranks.fault()]);
        })
        .def("break_group", &hr::Ranks::break_group)
        .def("num_gathers", &hr::Ranks::num_gathers)
        .def_static("bytes", &hr::Ranks::bytes, "slot_bytes"_a);

    module.def("layout", [](const string& format) { return string(format_of(format).layout); }, "format"_a);
    module.def("panel", [](const string& format) { return format_of(format).panel; }, "format"_a);
    module.def("packed_bytes", [](const string& format, int64_t num_out, int64_t num_in, int64_t group, int64_t flag) {
        return format_of(format).packed_bytes(num_out, num_in, group, flag);
    }, "format"_a, "num_out"_a, "num_in"_a, "group"_a, "flag"_a);
    module.def("pack", pack, "format"_a, "codes"_a, "d"_a, "m"_a, "num_in"_a, "group"_a, "flag"_a, "first"_a, "last"_a,
               "num_out"_a, "packed"_a, NoGil());
    module.def("unpack_row", unpack_row, "format"_a, "packed"_a, "num_out"_a, "num_in"_a, "group"_a, "flag"_a, "row"_a,
               "out"_a, NoGil());
    module.def("limits", limits, "num_threads"_a = 0, "seconds"_a = 0.5,
               "most_bytes"_a = (int64_t)2 << 30);
}
