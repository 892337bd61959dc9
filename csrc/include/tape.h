/* A tape: the operators of a step, in order, with their arguments. Running it is one call for any number of rows. */
#ifndef HEADRACE_TAPE_H
#define HEADRACE_TAPE_H

#include <stdint.h>

#include <vector>

#include "include/dispatch.h"
#include "include/kernels.h"

namespace hr {

class Tape {
  public:
    explicit Tape(const Kernels& kernels);
    ~Tape();
    Tape(const Tape&) = delete;
    Tape& operator=(const Tape&) = delete;

    /* Appends a record; `args` is copied. Returns its index. Throws std::invalid_argument with what is wrong. */
    int64_t add(int op, const void* args, size_t size);
    /* Runs records first ... last-1. A record without rows (dims[args.dim] == 0) is left out. `ns`, if given, has room
     * for last - first times, each from the barrier before to the barrier behind. */
    void run(int64_t first, int64_t last, int num_threads, int64_t* ns);

    int64_t size() const { return (int64_t)records_.size(); }
    int op(int64_t index) const { return records_[(size_t)index].op; }
    int64_t* dims() { return dims_; }
    int64_t dims_used() const { return dims_used_; }

  private:
    struct Record {
        HrOpFn fn;
        const void* args;
        int op;
    };
    struct Walk;
    static void walk(void* context, int tid, int num);

    Kernels kernels_;
    std::vector<Record> records_;
    int64_t* dims_;
    int64_t dims_used_ = HR_DIM_FREE;
};

}  // namespace hr
#endif
