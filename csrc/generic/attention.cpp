/* Paged attention. A piece of work is a run of rows of one chunk with one kv head; it walks the visible keys span by
 * span and keeps scores of one span only. With few combos the cache is read as it is stored; with many a span is first
 * widened to floats, once for all of them. */
#include "generic/attention_tiles.h"
#include "generic/attention_work.h"
#include "generic/ops.h"

namespace HR_NS {
namespace {

enum { WIDEN_FROM = 13 };
const float LEAST_TOP = 0x1p-100f; /* where the inverse is still finite */

struct Cache {
    const HrArgs_attention* args;
    int64_t kv_heads, head_dim, value_dim, ld_acc, group, block_size, ld_q, key_rows, value_row;
};

/* Keys of one span. tiles[t] holds 16 of them; ld_v is the distance of two values. */
struct Span {
    const void *k[SPAN_TILES], *v[SPAN_TILES];
    const void *k_scale[SPAN_TILES], *v_scale[SPAN_TILES]; /* 64 bytes of each tile, see kernels.h */
    int64_t ld_v;
};

/* Tile t of `span` is the one that holds position p. */
template <class K>
void point_at_tile(const Cache& c, const Keys& keys, int64_t p, int64_t t, Span* span) {
    typedef typename K::E E;
    int64_t slot = keys.blocks[p / c.block_size] * c.block_size + p % c.block_size;
    int64_t tile = slot / 16 * c.kv_heads + keys.kv_head;
    span->k[t] = (const E*)c.args->k + tile * c.key_rows * 16;
    span->v[t] = c.args->v ? (const E*)c.args->v + tile * c.value_row * 16 : span->k[t];
    if (K::scaled) {
        span->k_scale[t] = c.args->k_scale + tile * 16;
        span->v_scale[t] = (c.args->v ? c.args->v_scale : c.args->k_scale) + tile * 16;
    }
}

/* The tiles of the span that begins at position `begin`, as far as they hold keys. */
template <class K>
void point_at_span(const Cache& c, const Keys& keys, int64_t begin, Span* span) {
    for (int64_t p = most(begin, keys.first / 16 * 16); p < least(begin + HR_SPAN, keys.last); p += 16)
        point_at_tile<K>(c, keys, p, (p - begin) / 16, span);
}

/* What to fetch while that span is worked on: for each of its tiles the one that this thread needs as many tiles later
 * as a span has, be it of the next piece. */
template <class K>
void point_ahead(const Cache& c, const Keys& keys, const Keys* then, int64_t begin, Span* ahead) {
    const int64_t end = (keys.last + 15) / 16 * 16;
    for (int64_t p = most(begin, keys.first / 16 * 16); p < least(begin + HR_SPAN, keys.last); p += 16) {
        const int64_t later = p + HR_SPAN, t = (p - begin) / 16;
        if (later < end) {
            point_at_tile<K>(c, keys, later, t, ahead);
        } else if (then) {
            const int64_t q = then->first / 16 * 16 + later - end;
            if (q < then->last) point_at_tile<K>(c, *then, q, t, ahead);
        }
    }
}

/* Sixteen of its keys, from position p on, for any block size, by copying. */
template <class K>
void gather_tile(const Cache& c, const Keys& keys, int64_t p, int t, void* buffer, Span* span) {
    typedef typename K::E E;
    const int64_t size = c.key_rows * 16, v_size = c.value_row * 16;
    E *k = (E*)buffer + t * (size + v_size), *v = k + size;
    float *ks = (float*)((E*)buffer + SPAN_TILES * (size + v_size)) + t * 32, *vs = ks + 16;
    for (int64_t j = most(p, keys.first); j < least(p + 16, keys.last); j++) {
        int64_t slot = keys.blocks[j / c.block_size] * c.block_size + j % c.block_size, lane = slot % 16, i = j - p;
        int64_t tile = slot / 16 * c.kv_heads + keys.kv_head;
        const E* from = (const E*)c.args->k + tile * size + lane * (K::dot ? 4 : 1);
        if constexpr (K::dot) {
            const E* values = (const E*)c.args->v + tile * v_size + lane / 4 * 4 * c.value_row + lane % 4;
            for (int64_t d = 0; d < c.key_rows; d += 4) memcpy(k + d * 16 + i * 4, from + d * 16, 4);
            for (int64_t d = 0; d < c.value_row; d++) v[i / 4 * 4 * c.value_row + d * 4 + i % 4] = values[d * 4];
        } else {
            for (int64_t d = 0; d < c.key_rows; d++) k[d * 16 + i] = from[d * 16];
        }
        if (c.args->v && !K::dot)
            memcpy(v + i * c.value_row, (const E*)c.args->v + tile * v_size + lane * c.value_row,
                   (size_t)c.value_row * sizeof(E));
        const float* v_scale = c.args->v ? c.args->v_scale : c.args->k_scale;
        if (K::type == HR_I4) {
            for (int half = 0; half < 32; half += 16) {
                ((uint16_t*)ks)[i + half] = ((const uint16_t*)c.args->k_scale)[tile * 32 + lane + half];
                ((uint16_t*)vs)[i + half] = ((const uint16_t*)v_scale)[tile * 32 + lane + half];
            }
        } else if (K::scaled) {
            ks[i] = c.args->k_scale[tile * 16 + lane], vs[i] = v_scale[tile * 16 + lane];
        }
    }
    span->k[t] = k, span->v[t] = v, span->k_scale[t] = ks, span->v_scale[t] = vs;
}

template <class K>
void widen_tile(const Cache& c, int t, float* buffer, Span* span, const Span& next) {
    typedef typename K::E E;
    float *k = buffer + t * 16 * (c.ld_q + c.ld_acc), *v = k + 16 * c.ld_q;
    const E *from_k = (const E*)span->k[t], *from_v = (const E*)span->v[t];
    for (int64_t d = 0; d < c.key_rows; d++) {
        if constexpr (K::pair == 2) {
            const I both = load_u8(from_k + d * 16);
            store(k + d * 32, low_nibble(both));
            if (d * 2 + 1 < c.head_dim) store(k + d * 32 + 16, high_nibble(both));
        } else {
            store(k + d * 16, K::get(from_k + d * 16));
        }
        fetch((const E*)next.k[t] + d * 16);
    }
    span->k[t] = k, span->v[t] = v;
    if (!c.args->v) { /* turned: what lies behind value_dim is not read */
        for (int64_t d = 0; d < c.value_dim; d++)
            for (int64_t i = 0; i < 16; i++) v[i * c.ld_acc + d] = k[d * 16 + i];
        for (int64_t d = c.value_dim; d < c.ld_acc; d++)
            for (int64_t i = 0; i < 16; i++) v[i * c.ld_acc + d] = 0.0f;
        return;
    }
    for (int64_t d = 0; d < c.value_row; d++) fetch((const E*)next.v[t] + d * 16);
    int64_t whole = c.value_dim / 16 * 16;
    for (int i = 0; i < 16; i++) {
        const E* row = from_v + i * c.value_row;
        auto at = [&](int64_t d) { return K::pair == 2 ? d / 32 * 16 : d; };
        for (int64_t d = 0; d < whole; d += 16) store(v + i * c.ld_acc + d, value_at<K, false>(row + at(d), d, 16));
        if (whole < c.value_dim)
            store(v + i * c.ld_acc + whole, value_at<K, true>(row + at(whole), whole, c.value_dim - whole));
    }
}

float lanes_sum(const float* x, int64_t width) {
    V sum = zero();
    for (int64_t i = 0; i < width; i += 16) sum = add(sum, load_n(x + i, least(16, width - i)));
    return hsum(sum);
}

/* What a piece carries from span to span, by combo; lo ... hi - 1 are the keys of the span that the combo sees. */
struct State {
    float *q, *s, *acc, *m, *l, *alpha;
    float *q_sum, *b; /* what the least of each key, and of each value, counts (HR_I4) */
    int32_t *lo, *hi;
    const float** bias;      /* of the span's first key, if there are any */
    float *factor, *step;    /* of the scores, and of the weights' codes (HR_I8_DOT) */
    int32_t *words, *added;  /* the codes of q, and what the keys' 128 adds to their sums */
    uint8_t* codes;          /* of weights, [HR_SPAN] each */
};

/* Scores of 16 keys as the softmax takes them; those outside lo ... hi - 1 are as low as can be. bias: of the span, if any. */
template <class K>
HR_INLINE V finished_scores(const HrArgs_attention* a, const Span& span, const float* s, V factor, float q_sum,
                            const float* bias, int t, int lo, int hi) {
    V x = load(s + t * 16);
    if constexpr (K::scaled)
        x = mul(x, mul(factor, K::scale(span.k_scale[t])));
    else
        x = mul(x, factor);
    if constexpr (K::type == HR_I4) x = fma(mul(factor, K::least(span.k_scale[t])), set1(q_sum), x);
    if (a->softcap > 0) {
        const V cap = set1((float)a->softcap);
        x = mul(cap, tanh(div(x, cap)));
    }
    if (bias) x = add(x, load_n(bias + t * 16, least(16, hi - t * 16)));
    if (t * 16 + 16 > hi) x = select(first_n(hi - t * 16), x, set1(-__builtin_inff()));
    if (t * 16 < lo) x = select(first_n(lo - t * 16), set1(-__builtin_inff()), x);
    return x;
}

/* What the softmax of a combo's scores in one span gives: the sum of weights, of weights times the values' least, and the
 * greatest of weights times the values' scale, NaN where one is not finite. */
struct Sums {
    float w, least, top;
};

/* Scores -> weights (times v_scale where there is one), and in *best the greatest score so far. */
template <class K>
Sums weights(const HrArgs_attention* a, const Span& span, float* s, V factor, float q_sum, const float* bias, int lo, int hi,
             float* best) {
    V top = set1(-__builtin_inff()), sum = zero(), least = zero(), most = zero(), bad = zero();
    auto note = [&](V w) { most = max(most, w), bad = fma(w, zero(), bad); };
    auto sums = [&] {
        float greatest = 0.0f;
        if constexpr (K::dot) greatest = bits(le(bad, zero())) == 0xffff ? hmax(most) : __builtin_nanf("");
        return Sums{hsum(sum), K::type == HR_I4 ? hsum(least) : 0.0f, greatest};
    };
    if (lo == 0 && hi == HR_SPAN && !(a->softcap > 0) && !bias) { /* nearly always: scores stay in registers */
        V x[SPAN_TILES];
#pragma GCC unroll 8
        for (int t = 0; t < SPAN_TILES; t++) {
            x[t] = finished_scores<K>(a, span, s, factor, q_sum, nullptr, t, 0, HR_SPAN);
            top = max(top, x[t]);
        }
        float highest = hmax(top);
        *best = *best > highest ? *best : highest;
        const V mark = set1(*best);
#pragma GCC unroll 8
        for (int t = 0; t < SPAN_TILES; t++) {
            V w = exp_falling(sub(x[t], mark));
            sum = add(sum, w);
            if constexpr (K::type == HR_I4) least = fma(w, K::least(span.v_scale[t]), least);
            if constexpr (K::scaled) w = mul(w, K::scale(span.v_scale[t]));
            if constexpr (K::dot) note(w);
            store(s + t * 16, w);
        }
        return sums();
    }
    const int first = lo / 16, last = (hi + 15) / 16;
    for (int t = first; t < last; t++) {
        V x = finished_scores<K>(a, span, s, factor, q_sum, bias, t, lo, hi);
        store(s + t * 16, x);
        top = max(top, x);
    }
    float highest = hmax(top);
    *best = *best > highest ? *best : highest;
    const V mark = set1(*best);
    for (int t = first; t < last; t++) {
        V w = exp_falling(sub(load(s + t * 16), mark));
        sum = add(sum, w);
        if constexpr (K::type == HR_I4) { /* of a hidden key it may be anything, and its weight of 0 would not help */
            V minima = K::least(span.v_scale[t]);
            if (t * 16 + 16 > hi) minima = select(first_n(hi - t * 16), minima, zero());
            if (t * 16 < lo) minima = select(first_n(lo - t * 16), zero(), minima);
            least = fma(w, minima, least);
        }
        if constexpr (K::scaled) w = mul(w, K::scale(span.v_scale[t]));
        if constexpr (K::dot) { /* the scale of a hidden key may be anything */
            if (t * 16 + 16 > hi) w = select(first_n(hi - t * 16), w, zero());
            if (t * 16 < lo) w = select(first_n(lo - t * 16), zero(), w);
            note(w);
        }
        store(s + t * 16, w);
    }
    return sums();
}

/* A combo's weights in a span as codes, those of hidden keys too. */
void weight_codes(const State& st, int64_t n, float top) {
    uint8_t* codes = st.codes + n * HR_SPAN;
    const int first = st.lo[n] / 16, last = (st.hi[n] + 15) / 16;
    if (first > 0 || last < SPAN_TILES) memset(codes, 0, HR_SPAN);
    const V inverse = set1(top > LEAST_TOP ? 255.0f / top : 0.0f);
    for (int t = first; t < last; t++) {
        const V w = min(mul(load(st.s + n * LD_S + t * 16), inverse), set1(255.0f));
        uint64_t halves[2]; /* of codes less 128, which fit a signed byte */
        store_i8((int8_t*)halves, round_i32(sub(w, set1(128.0f))));
        halves[0] ^= 0x8080808080808080u, halves[1] ^= 0x8080808080808080u;
        memcpy(codes + t * 16, halves, 16);
    }
    st.step[n] = top / 255.0f;
}

/* A query's codes: four channels in a word, the high parts to words[0], words[2 * ld], ... and the low ones `ld` behind. */
void query_codes(const float* x, int64_t width, float* factor, int32_t* words, int64_t ld, int32_t* added) {
    V most = zero(), bad = zero();
    for (int64_t i = 0; i < width; i += 16) {
        const V y = load_n(x + i, least(16, width - i));
        most = max(most, abs(y)), bad = add(bad, mul(y, zero()));
    }
    const float top = hmax(select(lt(most, set1(__builtin_inff())), most, zero())) + hsum(bad);
    const float inverse = top > LEAST_TOP ? 16256.0f / top : 0.0f;
    I high_sum = izero(), low_sum = izero();
    for (int64_t i = 0; i < width; i += 16) {
        const V y = mul(load_n(x + i, least(16, width - i)), set1(inverse));
        const I code = iadd(round_i32(min(max(y, set1(-16256.0f)), set1(16256.0f))), iset1(64));
        const I high = shift_signed<7>(code), low = iadd(iand(code, iset1(127)), iset1(-64));
        int32_t parts[2][4];
        store_i8((int8_t*)parts[0], high), store_i8((int8_t*)parts[1], low);
        for (int64_t j = i / 4; j < i / 4 + 4 && j < (width + 3) / 4; j++)
            words[j * 2 * ld] = parts[0][j - i / 4], words[(j * 2 + 1) * ld] = parts[1][j - i / 4];
        high_sum = iadd(high_sum, high), low_sum = iadd(low_sum, low);
    }
    *factor *= top / 16256.0f;
    added[0] = ihsum(high_sum) * 128, added[1] = ihsum(low_sum) * 128;
}

/* The softmax of a tile of combos; m, l and alpha of those that see keys of the span. */
template <class K>
void softmax(const HrArgs_attention* a, const Span& span, State& st, int64_t base, int combos) {
    float best[16], sums[16], alphas[16], ls[16], leasts[16] = {0}, bs[16];
    for (int i = 0; i < combos; i++) {
        int64_t n = base + i;
        best[i] = st.m[n], sums[i] = 0.0f;
        if (st.lo[n] < st.hi[n]) {
            Sums totals = weights<K>(a, span, st.s + n * LD_S, set1(st.factor[n]), st.q_sum[n], st.bias[n], st.lo[n], st.hi[n],
                                     best + i);
            sums[i] = totals.w, leasts[i] = totals.least;
            if constexpr (K::dot) weight_codes(st, n, totals.top);
        } else if constexpr (K::dot) {
            memset(st.codes + n * HR_SPAN, 0, HR_SPAN);
        }
    }
    V alpha = exp_falling(sub(load_n(st.m + base, combos), load_n(best, combos)));
    store(alphas, alpha), store(ls, add(mul(load_n(st.l + base, combos), alpha), load_n(sums, combos)));
    store(bs, add(mul(load_n(st.b + base, combos), alpha), load_n(leasts, combos)));
    for (int i = 0; i < combos; i++)
        if (st.lo[base + i] < st.hi[base + i])
            st.m[base + i] = best[i], st.l[base + i] = ls[i], st.b[base + i] = bs[i], st.alpha[base + i] = alphas[i];
}

/* The second product for keys first ... last - 1 of the span. Keys that all combos see are walked together, those at
 * the ends that only some see one combo at a time: a hidden key's value enters no chain. */
template <class K>
void weigh(const Cache& c, const Span& span, const void* const* ahead, State& st, int64_t base, int combos) {
    const int32_t *from = st.lo + base, *to = st.hi + base;
    int all_from = 0, all_to = HR_SPAN;
    for (int i = 0; i < combos; i++) all_from = (int)most(all_from, from[i]), all_to = (int)least(all_to, to[i]);
    const int64_t dim = K::pair == 2 ? c.value_dim : span.ld_v; /* widened values are padded to whole vectors */
    auto alone = [&](int i, int begin, int end) {
        if (begin >= end) return;
        int64_t n = base + i;
        values<K>(1, st.s + n * LD_S, span.v, span.v, begin, end, dim, span.ld_v, st.alpha + n, st.acc + n * c.ld_acc,
                  c.ld_acc);
        st.alpha[n] = 1.0f;
    };
    if (all_from >= all_to) {
        for (int i = 0; i < combos; i++) alone(i, from[i], to[i]);
        return;
    }
    for (int i = 0; i < combos; i++) alone(i, from[i], all_from);
    values<K>(combos, st.s + base * LD_S, span.v, ahead, all_from, all_to, dim, span.ld_v, st.alpha + base,
              st.acc + base * c.ld_acc, c.ld_acc);
    for (int i = 0; i < combos; i++) st.alpha[base + i] = 1.0f;
    for (int i = 0; i < combos; i++) alone(i, all_to, to[i]);
}

template <class K, class Read>
void attend_span(const Cache& c, const Span& span, const Span& next, State& st, int64_t num_tiles, int64_t combos) {
    auto begin = [&](int64_t tile) { return combos * tile / num_tiles; };
    auto count = [&](int64_t tile) { return (int)(begin(tile + 1) - begin(tile)); };
    if constexpr (Read::dot) { /* few bytes a span: it stays in L1 beside a tile's scores */
        for (int64_t i = 0; i < num_tiles; i++) {
            const int64_t base = begin(i);
            int first = HR_SPAN, last = 0;
            for (int64_t n = base; n < begin(i + 1); n++)
                if (st.lo[n] < st.hi[n]) first = (int)least(first, st.lo[n]), last = (int)most(last, st.hi[n]);
            if (first >= last) continue;
            dot_scores(count(i), st.words + base * c.key_rows / 2, st.added + base * 2, span.k, i ? span.k : next.k,
                       first / 16, (last + 15) / 16, c.key_rows / 4, st.s + base * LD_S);
            softmax<K>(c.args, span, st, base, count(i));
            bool sees[MAX_COMBOS];
            for (int n = 0; n < count(i); n++) sees[n] = st.lo[base + n] < st.hi[base + n];
            dot_values(count(i), st.codes + base * HR_SPAN, span.v, i ? span.v : next.v, first / 4, (last + 3) / 4,
                       span.ld_v * 4, sees, st.step + base, st.alpha + base, st.acc + base * c.ld_acc, c.ld_acc);
            for (int n = 0; n < count(i); n++)
                if (sees[n]) st.alpha[base + n] = 1.0f;
        }
    } else {
        enum { PANEL = 4 }; /* key tiles whose floats stay in L1 while all combos pass */
        for (int panel = 0; panel < SPAN_TILES; panel += PANEL)
            for (int64_t i = 0; i < num_tiles; i++) {
                int64_t base = begin(i), end = begin(i + 1);
                int first = HR_SPAN, last = 0;
                for (int64_t n = base; n < end; n++)
                    if (st.lo[n] < st.hi[n]) first = (int)least(first, st.lo[n]), last = (int)most(last, st.hi[n]);
                first = (int)most(first / 16, panel), last = (int)least((last + 15) / 16, panel + PANEL);
                if (first < last)
                    scores<Read>((int)(end - base), st.q + base * c.ld_q, span.k, i ? span.k : next.k, first, last,
                                 c.head_dim, st.s + base * LD_S);
            }
        for (int64_t i = 0; i < num_tiles; i++) softmax<K>(c.args, span, st, begin(i), count(i));
        for (int64_t i = 0; i < num_tiles; i++) weigh<Read>(c, span, i ? span.v : next.v, st, begin(i), count(i));
    }
}

/* One piece; the next one is taken at the last span but one, so that its first keys can be fetched by then. */
template <class K>
bool attend(const HrArgs_attention* a, const Piece& piece, Work* work, Piece* next_piece, void* memory) {
    const int64_t dim = a->head_dim, width = a->value_dim;
    const Cache c = {a, a->kv_heads, dim, width, (width + 15) / 16 * 16, a->heads / a->kv_heads, a->block_size,
                     (dim + K::pair - 1) / K::pair * K::pair, K::key_rows(dim), K::value_row(width)};
    int64_t combos = piece.rows * piece.heads, num_tiles = (combos + MAX_COMBOS - 1) / MAX_COMBOS;
    /* Values that are a part of the keys are widened too, to lie as the second product reads them. */
    bool widen = !K::dot && (!a->v || (K::type != HR_F32 && combos >= WIDEN_FROM)), gather = c.block_size % 16 != 0;
    Scratch scratch = {(char*)memory};
    State st;
    st.q = scratch.take<float>(combos * c.ld_q);
    st.s = scratch.take<float>(combos * LD_S);
    st.acc = scratch.take<float>(combos * c.ld_acc);
    st.m = scratch.take<float>(combos), st.l = scratch.take<float>(combos), st.alpha = scratch.take<float>(combos);
    st.q_sum = scratch.take<float>(combos), st.b = scratch.take<float>(combos);
    st.lo = scratch.take<int32_t>(combos), st.hi = scratch.take<int32_t>(combos);
    st.bias = scratch.take<const float*>(combos);
    st.factor = scratch.take<float>(combos), st.step = scratch.take<float>(combos);
    st.words = scratch.take<int32_t>(K::dot ? combos * c.key_rows / 2 : 0);
    st.added = scratch.take<int32_t>(K::dot ? combos * 2 : 0);
    st.codes = scratch.take<uint8_t>(K::dot ? combos * HR_SPAN : 0);
    float* widened = scratch.take<float>(widen ? SPAN_TILES * 16 * (c.ld_q + c.ld_acc) : 0);
    const int64_t token_bytes = (c.key_rows + c.value_row) * (int64_t)sizeof(typename K::E) + 8;
    void* gathered = scratch.take<char>(gather ? SPAN_TILES * 16 * token_bytes : 0);

    const Keys keys = keys_of(a, piece);
    int64_t row = a->row_begin[piece.chunk] + piece.row, start = a->start[piece.chunk] + piece.row;
    for (int64_t r = 0; r < piece.rows; r++) {
        const float* x = a->x + (row + r) * a->ld_x + (piece.kv_head * c.group + piece.head) * c.head_dim;
        for (int64_t d = 0; d < piece.heads * c.head_dim; d += 16) fetch(x + d);
    }
    for (int64_t i = 0; i < num_tiles; i++) {
        int64_t base = combos * i / num_tiles, count = combos * (i + 1) / num_tiles - base;
        const float* x[MAX_COMBOS];
        for (int64_t n = 0; n < count; n++) {
            int64_t head = piece.kv_head * c.group + piece.head + (base + n) % piece.heads;
            x[n] = a->x + (row + (base + n) / piece.heads) * a->ld_x + head * c.head_dim;
        }
        for (int64_t n = base; n < base + count; n++) {
            st.factor[n] = (float)a->scale;
            if constexpr (K::dot)
                query_codes(x[n - base], c.head_dim, st.factor + n, st.words + base * c.key_rows / 2 + n - base, count,
                            st.added + n * 2);
        }
        if constexpr (K::dot) continue;
        float* q = st.q + base * c.ld_q;
        for (int64_t d = 0; d < c.head_dim; d++)
            for (int64_t n = 0; n < count; n++) *q++ = x[n][d];
        for (int64_t n = c.head_dim * count; n < c.ld_q * count; n++) *q++ = 0.0f;
        for (int64_t n = 0; n < count; n++) st.q_sum[base + n] = K::pair == 2 ? lanes_sum(x[n], c.head_dim) : 0.0f;
    }
    for (int64_t n = 0; n < combos; n++) {
        const int64_t head = piece.kv_head * c.group + piece.head + n % piece.heads;
        st.m[n] = a->sinks ? a->sinks[head] : -__builtin_inff(), st.l[n] = a->sinks ? 1.0f : 0.0f, st.b[n] = 0.0f;
    }
    memset(st.acc, 0, (size_t)(combos * c.ld_acc) * sizeof(float));

    bool more = false, has_next = false;
    Keys then = keys;
    Span span = {};
    span.ld_v = c.value_row;
    for (int64_t begin = keys.first / HR_SPAN * HR_SPAN; begin < keys.last; begin += HR_SPAN) {
        const int first_tile = (int)(most(0, keys.first - begin) / 16);
        const int last_tile = (int)((least(HR_SPAN, keys.last - begin) + 15) / 16);
        for (int64_t r = 0; r < piece.rows; r++) {
            int32_t lo = (int32_t)most(0, low_of(a, start + r) - begin);
            int32_t hi = (int32_t)least(HR_SPAN, end_of(a, piece.chunk, start + r) - begin);
            for (int64_t g = 0; g < piece.heads; g++) {
                const int64_t n = r * piece.heads + g, head = piece.kv_head * c.group + piece.head + g;
                st.lo[n] = lo, st.hi[n] = hi;
                st.bias[n] = a->bias ? a->bias + head * a->ld_bias + a->ld_bias / 2 + begin - (start + r) : nullptr;
            }
        }
        if (!has_next && begin + 2 * HR_SPAN >= keys.last) {
            has_next = true, more = work->take(next_piece);
            if (more) then = keys_of(a, *next_piece);
        }
        if (gather)
            for (int t = first_tile; t < last_tile; t++) gather_tile<K>(c, keys, begin + t * 16, t, gathered, &span);
        else
            point_at_span<K>(c, keys, begin, &span);
        Span ahead = span;
        if (!gather) point_ahead<K>(c, keys, more ? &then : nullptr, begin, &ahead);
        if (K::scaled)
            for (int t = first_tile; t < last_tile; t++) fetch(ahead.k_scale[t]), fetch(ahead.v_scale[t]);
        if constexpr (!K::dot)
            if (widen) {
                Span floats = span;
                floats.ld_v = c.ld_acc;
                for (int t = first_tile; t < last_tile; t++) widen_tile<K>(c, t, widened, &floats, ahead);
                attend_span<K, F32>(c, floats, floats, st, num_tiles, combos);
                continue;
            }
        attend_span<K, K>(c, span, ahead, st, num_tiles, combos);
    }

    for (int64_t n = 0; n < combos; n++) {
        int64_t head = piece.kv_head * c.group + piece.head + n % piece.heads;
        float* out = a->out + (row + n / piece.heads) * a->ld_out + head * c.value_dim;
        for (int64_t d = 0; d < c.value_dim; d += 16) {
            V sum = load(st.acc + n * c.ld_acc + d);
            if constexpr (K::type == HR_I4) sum = add(sum, set1(st.b[n]));
            store_n(out + d, div(sum, set1(st.l[n])), least(16, c.value_dim - d));
        }
    }
    return more;
}

}  // namespace

void attention(const HrArgs_attention* a, HrTask* task) {
    Work work(a, task);
    Piece piece, next;
    for (bool more = work.take(&piece); more; piece = next) switch (a->kv_type) {
#define HR_CASE(K) \
    case K::type: more = attend<K>(a, piece, &work, &next, task->scratch); break
            HR_CASE(F32);
            HR_CASE(F16);
            HR_CASE(BF16);
            HR_CASE(E4M3);
            HR_CASE(E5M2);
            HR_CASE(I4);
            HR_CASE(I8Dot);
            default: more = attend<I8>(a, piece, &work, &next, task->scratch);
#undef HR_CASE
        }
}

}  // namespace HR_NS
