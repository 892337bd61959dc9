#include "include/tape.h"

#include <stdlib.h>
#include <string.h>

#include <stdexcept>
#include <string>

#include "include/team.h"

namespace hr {

/* Every struct of arguments begins with the dimension that says how many rows there are. */
#define HR_CHECK_DIM(op) static_assert(offsetof(HrArgs_##op, dim) == 0, #op " must begin with dim");
HR_OPS(HR_CHECK_DIM)
#undef HR_CHECK_DIM

static const size_t sizes[] = {
#define HR_SIZE(op) sizeof(HrArgs_##op),
    HR_OPS(HR_SIZE)
#undef HR_SIZE
};
static const char* const names[] = {
#define HR_NAME(op) #op,
    HR_OPS(HR_NAME)
#undef HR_NAME
};

static const size_t LINE = 64;

static void* new_lines(size_t size) {
    void* memory = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (!memory) throw std::bad_alloc();
    return memory;
}

Tape::Tape(const Kernels& kernels) : kernels_(kernels), dims_((int64_t*)new_lines(HR_NUM_DIMS * sizeof(int64_t))) {
    memset(dims_, 0, HR_NUM_DIMS * sizeof(int64_t));
}

Tape::~Tape() {
    for (const Record& record : records_) free((void*)record.args);
    free(dims_);
}

int64_t Tape::add(int op, const void* args, size_t size) {
    std::string name = names[op];
    if (!kernels_.op[op]) throw std::invalid_argument("no ISA of this tape serves " + name);
    if (size != sizes[op])
        throw std::invalid_argument(name + " takes " + std::to_string(sizes[op]) + " bytes of arguments, not " +
                                    std::to_string(size));
    int64_t dim;
    memcpy(&dim, args, sizeof dim);
    if (dim < 0 || dim >= HR_NUM_DIMS)
        throw std::invalid_argument(name + ": dim must be 0 ... " + std::to_string(HR_NUM_DIMS - 1));
    int64_t end = dim + 1;
    if (op == HR_OP_moe_group) {
        HrArgs_moe_group group;
        memcpy(&group, args, sizeof group);
        if (group.num_experts < 1 || group.num_experts > HR_MAX_EXPERTS)
            throw std::invalid_argument(name + ": num_experts must be 1 ... " + std::to_string(HR_MAX_EXPERTS));
        if (group.first < 0 || group.num_own < 0 || group.first > group.num_experts - group.num_own)
            throw std::invalid_argument(name + ": its own experts must be some of num_experts");
        end = HR_NUM_DIMS;
    }
    void* copy = new_lines(size);
    memcpy(copy, args, size);
    if (op == HR_OP_linear_each) {
        HrArgs_linear_each* each = (HrArgs_linear_each*)copy;
        const bool linear = each->op >= HR_OP_linear_i4 && each->op <= HR_OP_linear_f;
        each->fn = linear ? (const void*)kernels_.op[each->op] : nullptr;
        if (!each->fn || each->count < 1 || each->count > HR_MAX_EXPERTS) {
            free(copy);
            throw std::invalid_argument(name + ": op must be a linear layer, count 1 ... " + std::to_string(HR_MAX_EXPERTS));
        }
    }
    records_.push_back({kernels_.op[op], copy, op});
    if (end > dims_used_) dims_used_ = end;
    return this->size() - 1;
}

/* Whether no row has an adapter: the number of tiles was written before the run. */
static bool is_idle(int op, const void* args) {
    if (op == HR_OP_adapt_in) return ((const HrArgs_adapt_in*)args)->tiles[0] == 0;
    return op == HR_OP_adapt_out && ((const HrArgs_adapt_out*)args)->tiles[0] == 0;
}

struct Tape::Walk {
    Tape* tape;
    int64_t first, last, *ns;
};

void Tape::walk(void* context, int tid, int num) {
    const Walk walk = *(const Walk*)context;
    const Record* records = walk.tape->records_.data();
    int64_t* dims = walk.tape->dims_;
    HrTask task = {tid, num, dims, &team_work()->counter, team_scratch(tid)};
    int64_t* ns = tid == 0 ? walk.ns : nullptr;
    int64_t before = ns ? now_ns() : 0;
    for (int64_t i = walk.first; i < walk.last; i++) {
        const Record& record = records[i];
        /* All threads read the same number: it was written before the last barrier. */
        if (dims[*(const int64_t*)record.args] > 0 && !is_idle(record.op, record.args)) {
            record.fn(record.args, &task);
            /* Behind the last one the end of the run is barrier enough. */
            if (i + 1 < walk.last || walk.ns) team_barrier(num);
        }
        if (ns) {
            int64_t now = now_ns();
            ns[i - walk.first] = now - before;
            before = now;
        }
    }
}

void Tape::run(int64_t first, int64_t last, int num_threads, int64_t* ns) {
    Walk context = {this, first, last, ns};
    team_run(num_threads, walk, &context);
}

}  // namespace hr
