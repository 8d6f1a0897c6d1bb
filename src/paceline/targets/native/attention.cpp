// Attention of every new token over its own list of cache slots (a shared prefix, then a path through the draft tree),
// or, in a layer with a window, over the list's end. As a list holds the token's ancestors, one for each position, a
// window counts positions.
//
// Blocking. The list is cut into chunks of 128 entries by list index. A chunk's softmax is computed alone: its maximum
// m, the sum s of e^(score - m) and the values weighted by it; chunks are then folded together in list order. So a
// token's result depends only on what stands in its list. Up to 8 neighbouring tokens x the heads of one key/value head
// (4 at most) go through a chunk as a group: together over the slots that all of them see, then each over what is left
// of its own list. Narrow passes spread (heads, chunk, group) over the threads and fold afterwards, in a very long
// context some chunks at a time; wide ones give a thread (heads, group), and fold chunk by chunk. attention.h has the
// loops inside.
#include <array>
#include <utility>

#include "attention.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr int HEADS = 4, TOKENS = 8;  // of a group

struct Heads {  // query heads first .. first + count - 1 read key/value head `kv`
    int kv, first, count;
};

struct Part {  // softmax over a part of the list, not yet divided by `s`
    float m[HEADS], s[HEADS];
    alignas(64) float values[HEADS][MAX_HEAD_DIM];
};

constexpr size_t MOST_PARTS = (64 << 20) / sizeof(Part);  // of a narrow pass, whose thread never gives them back

// A key/value head's groups of query heads are cut evenly into at most HEADS each.
inline int groups_per_kv(const Model& model) { return (model.heads / model.kv_heads + HEADS - 1) / HEADS; }

inline Heads heads_of(const Model& model, int group) {
    const int shared = model.heads / model.kv_heads, groups = groups_per_kv(model);
    const int kv = group / groups, i = group % groups, from = shared * i / groups;
    return {kv, kv * shared + from, shared * (i + 1) / groups - from};
}

// One layer's attention, as its groups see it.
class Attention {
  public:
    Attention(const Model& model, const Pass& pass, int layer, const float* q, int ldq)
        : model_(model), pass_(pass), layer_(layer), window_(model.layers[layer].window),
          sinks_(model.layers[layer].sinks), q_(q), ldq_(ldq) {}

    // Chunk `chunk` of tokens first .. last-1, at most TOKENS; token t's result goes to part(t).
    template <class To>
    void attend(int first, int last, Heads heads, int chunk, To part) const {
        while (first < last) {  // row by row of the batch
            int end = first + 1;
            while (end < last && pass_.row[end] == pass_.row[first]) end++;
            attend_row(first, end, heads, chunk * CHUNK, part);
            first = end;
        }
    }

    void fold(Part& state, const Part& part, int heads) const {
        for (int g = 0; g < heads; g++) {
            const float m = std::max(state.m[g], part.m[g]);
            const vf old = exp(splat<vf>(state.m[g] - m)), next = exp(splat<vf>(part.m[g] - m));
            state.m[g] = m;
            state.s[g] = state.s[g] * old[0] + part.s[g] * next[0];
            for (int d = 0; d < model_.head_dim; d += LANES)
                store(state.values[g] + d,
                      fma(next, load<vf>(part.values[g] + d), old * load<vf>(state.values[g] + d)));
        }
    }

    void finish(const Part& state, Heads heads, float* out) const {
        for (int g = 0; g < heads.count; g++) {
            float* to = out + (heads.first + g) * model_.head_dim;
            // What it takes off the others, as one more score would.
            const float sink = sinks_ ? exp(splat<vf>(sinks_[heads.first + g] - state.m[g]))[0] : 0.0f;
            const float share = 1.0f / (state.s[g] + sink);
            for (int d = 0; d < model_.head_dim; d++) to[d] = state.values[g][d] * share;
        }
    }

  private:
    struct Group {  // queries by token, then head; padded, so that loops over registers and over four keys end evenly
        alignas(64) float queries[TOKENS * HEADS][MAX_HEAD_DIM], scores[TOKENS * HEADS + PER][CHUNK + PANEL];
        float *score[TOKENS * HEADS + PER], *sums[TOKENS * HEADS];
        const float *keys, *values;
        int32_t slots[CHUNK];
    };

    template <class To>
    void attend_row(int first, int last, Heads heads, int from, To part) const {
        const int dims = model_.head_dim;
        Group group;
        int tokens[TOKENS], active = 0, count = 0;
        Range common = {CHUNK, CHUNK};  // of the chunk: from the first entry that any token sees to where lists part
        for (int t = first; t < last; t++) {
            const Range entries = within(t, from);
            if (entries.size() <= 0) continue;
            for (int h = 0; h < heads.count; h++, count++) {
                arrange(q_ + (size_t)t * ldq_ + (heads.first + h) * dims, count, group);
                group.sums[count] = part(t).values[h];
                std::memset(group.sums[count], 0, sizeof(float) * round_up(dims, PANEL));
            }
            tokens[active++] = t;
            common = {std::min(common.first, entries.first), std::min(common.last, pass_.prefix[t] - from)};
        }
        if (!active) return;
        clear_beyond(count, group);
        for (int i = 0; i < count + PER; i++) group.score[i] = group.scores[i];
        const Stored& cache = pass_.cache[layer_];
        group.keys = cache.at(cache.keys, pass_.row[first], heads.kv, dims);
        group.values = cache.at(cache.values, pass_.row[first], heads.kv, dims);
        common.last = std::max(common.last, 0);
        for (int j = common.first; j < common.last; j++) group.slots[j] = from + j;
        score_all(group, 0, count, common.first, common.last);
        for (int i = 0; i < active; i++) {  // the rest of each token's list, on top of what all share
            const int t = tokens[i], query = i * heads.count;
            const Range entries = within(t, from), own = {std::max(common.last, entries.first), entries.last};
            fill(group, t, from, own);
            score_all(group, query, heads.count, own.first, own.last);
            for (int h = 0; h < heads.count; h++) {
                float* scores = group.score[query + h];
                for (int j = common.first; j < entries.first; j++) scores[j] = 0.0f;  // seen by others only
                weights(scores, entries, part(t).m[h], part(t).s[h]);
            }
        }
        weigh_all(group, 0, count, common.first, common.last);
        for (int i = 0; i < active; i++) {
            const int t = tokens[i];
            const Range entries = within(t, from), own = {std::max(common.last, entries.first), entries.last};
            fill(group, t, from, own);
            weigh_all(group, i * heads.count, heads.count, own.first, own.last);
        }
    }

    // What a token sees of the chunk that begins at entry `from` of its list; of no size, or less: nothing.
    Range within(int t, int from) const {
        const Range entries = seen(pass_, window_, t);
        return {std::max(0, entries.first - from), std::min(CHUNK, entries.last - from)};
    }

    // Of these entries of the chunk; an entry's lane is that of its place in the chunk.
    void weights(float* scores, Range entries, float& m, float& s) const {
        const int unseen = entries.first % LANES, count = entries.size() + unseen;
        scores += entries.first - unseen;
        if (model_.score_cap) cap_scores(scores, count, model_.scale, model_.score_cap);
        soften(scores, unseen, count, model_.score_cap ? 1.0f : model_.scale, m, s);
    }

    void fill(Group& group, int t, int from, Range own) const {
        const int prefix = pass_.prefix[t], extra = pass_.extra_start[t] - prefix + from;
        for (int j = own.first; j < own.last; j++)
            group.slots[j] = from + j < prefix ? from + j : pass_.extra[extra + j];
    }

    // A query's dimensions beside those of the others of its register, eight by eight; zeros beyond its last.
    void arrange(const float* q, int query, Group& group) const {
        float* to = group.queries[query / PER * PER] + query % PER * LANES;
        for (int d = 0; d < model_.head_dim; d += LANES)
            store(to + d * PER, load_dims<vf, false>(q, d, model_.head_dim));
    }

    // The last register's places for queries that there are not. What stood on the stack may be denormal numbers, whose
    // products take far longer, though nobody asks for their scores.
    void clear_beyond(int count, Group& group) const {
        for (; count % PER; count++)
            for (int d = 0; d < model_.head_dim; d += LANES)
                store(group.queries[count / PER * PER] + count % PER * LANES + d * PER, vf{});
    }

    void score_all(Group& group, int first, int count, int from, int to) const {
        if (from >= to) return;
        const bool whole = model_.head_dim % LANES == 0;
        // Registers that are only in part of this token's are scored whole: the others' scores go to nobody.
        const int last = (first + count + PER - 1) / PER * PER;
        float* scores[TOKENS * HEADS + PER];
        for (int i = first / PER * PER; i < last; i++)
            scores[i] = i < first || i >= first + count ? group.scores[TOKENS * HEADS] : group.score[i];
        const float* values = group.values;
        for (int i = first / PER * PER; i < last; values = nullptr) {
            const int registers = std::min(REGISTERS, (last - i) / PER);
            SCORES[whole][registers](group.queries[i], PER * MAX_HEAD_DIM, model_.head_dim, group.keys, values,
                                     group.slots, from, to, scores + i);
            i += registers * PER;
        }
    }

    void weigh_all(Group& group, int first, int count, int from, int to) const {
        if (from >= to) return;
        const int dims = model_.head_dim;
        const float* next = group.keys + (size_t)CHUNK * dims;
        for (int i = first; i < first + count;) {
            const int queries = std::min(QUERIES, first + count - i);
            for (int d = 0, step; d < dims; d += step, next = nullptr) {
                const bool four = d + 4 * WIDE <= dims;
                step = (four ? 4 : 1) * WIDE;
                WEIGHS[four][queries](group.score + i, d, dims, group.values, next, group.slots, from, to,
                                      group.sums + i);
            }
            i += queries;
        }
    }

    using Score = void (*)(const float*, int, int, const float*, const float*, const int32_t*, int, int, float* const*);
    using Weigh = void (*)(const float* const*, int, int, const float*, const float*, const int32_t*, int, int,
                           float* const*);
    template <bool WHOLE>
    static constexpr auto scores_of = []<size_t... I>(std::index_sequence<I...>) {
        return std::array<Score, REGISTERS + 1>{nullptr, score<I + 1, WHOLE>...};
    }(std::make_index_sequence<REGISTERS>());
    template <int N>
    static constexpr auto weighs_of = []<size_t... I>(std::index_sequence<I...>) {
        return std::array<Weigh, QUERIES + 1>{nullptr, weigh<I + 1, N, (N > 1)>...};
    }(std::make_index_sequence<QUERIES>());
    static constexpr std::array SCORES = {scores_of<false>, scores_of<true>};
    static constexpr std::array WEIGHS = {weighs_of<1>, weighs_of<4>};  // registers of dimensions

    const Model& model_;
    const Pass& pass_;
    const int layer_, window_;
    const float* const sinks_;
    const float* const q_;
    const int ldq_;
};

inline bool narrow(const Model& model, const Pass& pass) {
    return (int64_t)pass.tokens * model.kv_heads <= 32 * pass.threads;
}

// Of a narrow pass's chunks, so many have parts at a time: what is folded already is one of them.
inline int chunks_at_once(const Model& model, const Pass& pass, Range all) {
    const size_t each = (size_t)model.kv_heads * groups_per_kv(model) * pass.tokens;
    return (int)std::min<size_t>(all.size(), std::max<size_t>(MOST_PARTS / each, 2));
}

// Tokens of a group: as many as leave every thread some groups, of `each` jobs.
inline int group_size(const Pass& pass, int each) {
    int size = TOKENS;
    while (size > 1 && (pass.tokens + size - 1) / size * each < 6 * pass.threads) size /= 2;
    return size;
}

}  // namespace

size_t attention_floats(const Model& model, const Pass& pass) {
    if (!narrow(model, pass)) return 0;
    const size_t heads = (size_t)model.kv_heads * groups_per_kv(model);
    const int deep = chunks_at_once(model, pass, chunks(pass, 0, 0, pass.tokens));
    return heads * pass.tokens * deep * (sizeof(Part) / sizeof(float));
}

void attention(Team& team, const Model& model, const Pass& pass, int layer, const float* q, int ldq, float* out,
               int ldo, float* workspace) {
    const Attention all(model, pass, layer, q, ldq);
    const int head_groups = model.kv_heads * groups_per_kv(model), tokens = pass.tokens;
    const int window = model.layers[layer].window;
    if (narrow(model, pass)) {
        const Range all_chunks = chunks(pass, window, 0, tokens);
        const int deep = chunks_at_once(model, pass, all_chunks), size = group_size(pass, head_groups * deep);
        const int groups = (tokens + size - 1) / size;
        Part* parts = (Part*)workspace;  // by heads, chunk and token
        // Chunks from .. last-1 are attended, and folded into what those before have become: chunk `base`, from the
        // second turn on.
        for (int base = all_chunks.first, from = base; from < all_chunks.last; base += deep - 1, from = base + 1) {
            const int last = std::min(base + deep, all_chunks.last), count = last - from;
            const auto part = [&](int heads, int chunk, int t) -> Part& {
                return parts[((size_t)heads * deep + chunk - base) * tokens + t];
            };
            team.each(head_groups * count * groups, 1, [&](int i, int) {
                const int heads = i / groups / count, first = i % groups * size;
                const int chunk = from + i / groups % count;
                all.attend(first, std::min(first + size, tokens), heads_of(model, heads), chunk,
                           [&](int t) -> Part& { return part(heads, chunk, t); });
            });
            team.each(head_groups * tokens, 4, [&](int i, int) {
                const int heads = i / tokens, t = i % tokens;
                const Heads some = heads_of(model, heads);
                const Range own = chunks(pass, window, t);
                if (own.last <= from || last <= own.first) return;  // it is finished, or begins later
                const int begin = std::max(own.first, base);
                Part& state = part(heads, begin, t);
                for (int chunk = begin + 1; chunk < std::min(own.last, last); chunk++)
                    all.fold(state, part(heads, chunk, t), some.count);
                if (own.last <= last)
                    all.finish(state, some, out + (size_t)t * ldo);
                else if (begin > base)
                    part(heads, base, t) = state;
            });
        }
        return;
    }
    const int size = group_size(pass, head_groups), groups = (tokens + size - 1) / size;
    team.each(head_groups * groups, 1, [&](int i, int) {
        const int first = i % groups * size, last = std::min(first + size, tokens);
        const Heads heads = heads_of(model, i / groups);
        Part state[TOKENS], next[TOKENS];
        const Range some = chunks(pass, window, first, last);
        for (int chunk = some.first; chunk < some.last; chunk++) {
            const auto begins = [&](int t) { return chunk == chunks(pass, window, t).first; };
            all.attend(first, last, heads, chunk,
                       [&](int t) -> Part& { return begins(t) ? state[t - first] : next[t - first]; });
            for (int t = first; t < last; t++) {
                const Range own = chunks(pass, window, t);
                if (own.first < chunk && chunk < own.last)
                    all.fold(state[t - first], next[t - first], heads.count);
            }
        }
        for (int t = first; t < last; t++) all.finish(state[t - first], heads, out + (size_t)t * ldo);
    });
}

}  // namespace paceline::PACELINE_ISA
