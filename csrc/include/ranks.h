/* The ranks of one model: processes that compute the same steps, each some columns of every matrix, and put their columns
 * together: on one host in memory that all of them map, on several by an exchange of their parts.
 *
 * Owns the layout of that memory, the barrier of the processes, and the room for the parts. Knows no operators, no models
 * and no networks. All ranks make the
 * same gathers in the same order; each gather is stamped with the call that it belongs to, so that ranks out of step
 * find it out instead of reading each other's wrong rows. A rank that waits too long breaks the group: then all gathers
 * return at once, what they leave in `out` is of no use, and `fault` says why. */
#ifndef HEADRACE_RANKS_H
#define HEADRACE_RANKS_H

#include <stddef.h>
#include <stdint.h>

#include <functional>

namespace hr {

enum { MAX_RANKS = 64 };
/* Why a group is broken. LOST: `break_group` of any rank. */
enum Fault { SOUND = 0, TIMEOUT = 1, OUT_OF_STEP = 2, LOST = 3 };

struct SharedGroup; /* at the beginning of the memory */

/* Sends the first `bytes` of this rank's part to all others, and receives the parts of the others, of any size that they
 * have room for. Returns whether it did. */
using Exchange = std::function<bool(int64_t bytes)>;

/* One rank's view. Used by one thread at a time, but for `break_group`. */
class Ranks {
  public:
    /* Maps `fd`, a file of bytes(slot_bytes) zeros at first. timeout_ns: of each barrier. spins: whether every rank has
     * processors of its own. Throws std::invalid_argument, std::runtime_error. */
    Ranks(int fd, int rank, int world, int64_t slot_bytes, int64_t timeout_ns, bool spins);
    /* On hosts of their own: the parts of a gather lie in private memory, and `exchange` moves them. */
    Ranks(int rank, int world, int64_t slot_bytes, Exchange exchange);
    ~Ranks();
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    static size_t bytes(int64_t slot_bytes);

    /* The gathers from now on belong to call `id`. */
    void begin(uint64_t id);
    Fault fault() const;
    void break_group();
    int64_t num_gathers() const { return (int64_t)gathers_; }
    int rank() const { return rank_; }
    int world() const { return world_; }

    /* Within an operator. The slot of a gather, by its number, of slot_bytes. */
    char* slot(int64_t gather) const;
    int64_t slot_bytes() const { return slot_bytes_; }
    /* By one thread of each rank: returns when all ranks have written their part of the slot; false if the group is
     * broken. The next gather has the other slot. */
    bool meet();
    void next() { gathers_++; }

    /* Of ranks that exchange: the part of a rank, of part_bytes(), after its stamp of STAMP_BYTES. */
    enum { STAMP_BYTES = 64 };
    bool exchanges() const { return (bool)exchange_; }
    char* part(int rank) const;
    int64_t part_bytes() const { return slot_bytes_ + STAMP_BYTES; }
    /* By one thread, instead of meet(): sizes[r] bytes of rows follow the stamp of rank r. */
    bool exchange(const int64_t* sizes);

  private:
    void check() const;
    bool wait(uint32_t seen);
    void fail(Fault why);

    SharedGroup* shared_;
    size_t size_;
    int rank_, world_;
    int64_t slot_bytes_, timeout_ns_, spin_ns_;
    uint64_t gathers_ = 0, call_ = 0, of_call_ = 0;
    Exchange exchange_;
};

}  // namespace hr
#endif
