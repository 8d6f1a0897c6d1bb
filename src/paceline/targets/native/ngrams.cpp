// Counting n-grams, and what comes next: see drafters/trigram/counts.py and mixture.py for what and why.
#include "ngrams.h"

#include <algorithm>
#include <vector>

namespace paceline {
namespace {

constexpr uint64_t SEED = 0x9E3779B97F4A7C15;  // the hash of no context at all
constexpr double LEAST = 0.002;                // stop looking for less than this probability

uint64_t step(uint64_t hashed, int64_t token) {
    uint64_t mixed = (hashed ^ (uint64_t)token) * 0xD6E8FEB86659FD93;
    mixed ^= mixed >> 32;
    return mixed | 1;
}

int64_t first_slot(const Counts& counts, uint64_t hashed) {  // where to look for a context
    return (int64_t)(hashed >> 32) & (counts.slot_count - 1);
}

Slot& find(const Counts& counts, uint64_t hashed) {  // that of a context, or the free one where it belongs
    const int64_t last = counts.slot_count - 1;
    int64_t slot = first_slot(counts, hashed);
    while (counts.slots[slot].hash != hashed && counts.slots[slot].hash != 0) slot = (slot + 1) & last;
    return counts.slots[slot];
}

void increment(const Counts& counts, uint64_t hashed, int64_t token, double weight) {
    Counted* entries = counts.entries;
    Slot& context = find(counts, hashed);
    if (context.hash == 0) {
        context.hash = hashed;
        context.first = -1;
        counts.used[0]++;
    }
    context.total = (float)(context.total + weight);
    int before = -1, place = context.first;
    while (place >= 0 && entries[place].token != token) {
        before = place;
        place = entries[place].next;
    }
    if (place < 0) {
        place = (int)counts.used[1]++;
        entries[place].token = (int32_t)token;
        entries[place].count = 0;
        context.kinds++;
    } else if (before >= 0) {
        entries[before].next = entries[place].next;
    } else {
        context.first = entries[place].next;
    }
    entries[place].count = (float)(entries[place].count + weight);
    entries[place].next = context.first;  // it is now the most recent
    context.first = place;
}

// Where `token` is among the first `known`, or else will be; -1 if there is no room.
int place_of(const Successors& found, int known, int64_t token) {
    for (int place = 0; place < known; place++)
        if (found.tokens[place] == token) return place;
    return found.size < MOST_SUCCESSORS ? found.size : -1;
}

// Give `p` to `token`, which may be among the first `known` already; of it, `own` comes from the text's own counts.
void add(Successors& found, int known, int64_t token, double p, double own = 0) {
    const int place = place_of(found, known, token);
    if (place == found.size) {
        found.tokens[place] = token;
        found.probs[place] = p;
        found.own[place] = own;
        found.size++;
    } else if (place >= 0) {
        found.probs[place] += p;
        found.own[place] += own;
    }
}

// Returns what it leaves over of the probability `left`.
double from_counts(const Counts& counts, double scale, uint64_t hashed, double left, Successors& found, bool own) {
    const Slot& counted = find(counts, hashed);
    if (counted.hash != hashed) return left;
    const double novel = counted.kinds, total = scale * counted.total + novel;
    const int known = found.size;
    int entry = counted.first;
    for (int walked = 0; entry >= 0 && walked < MOST_SUCCESSORS; walked++) {
        const Counted& next = counts.entries[entry];
        const double p = left * scale * next.count / total;
        add(found, known, next.token, p, own ? p : 0);
        entry = next.next;
    }
    return left * novel / total;
}

uint64_t hash(const int64_t* end, int order) {
    uint64_t hashed = SEED;
    for (int back = 1; back < order; back++) hashed = step(hashed, end[-back]);
    return hashed;
}

uint64_t number(const void* array, int bytes, int64_t at) {
    if (bytes == 2) return ((const uint16_t*)array)[at];
    if (bytes == 4) return ((const uint32_t*)array)[at];
    return ((const uint64_t*)array)[at];
}

struct Range {
    int64_t start, stop;
};

Range find(const Table& table, const int64_t* end, int order, int bits) {
    const int64_t* first = end - order + 1;
    for (const int64_t* token = first; token < end; token++)
        if (*token < 0 || *token >= table.vocabulary) return {0, 0};
    uint64_t key = 0;
    for (const int64_t* token = first + 1; token < end; token++) key = key << bits | (uint64_t)*token;
    int64_t low = table.heads[*first];
    const int64_t stop = table.heads[*first + 1];
    for (int64_t high = stop; low < high;) {
        const int64_t middle = (low + high) >> 1;
        if (number(table.keys, table.key_bytes, middle) < key) low = middle + 1;
        else high = middle;
    }
    const bool found = low < stop && number(table.keys, table.key_bytes, low) == key;
    return found ? Range{table.offsets[low], table.offsets[low + 1]} : Range{0, 0};
}

void find_literally(const Ngrams& ngrams, const int64_t* end, Successors& found) {
    const Rule& rule = ngrams.rule;
    const Table& table = ngrams.tables[0];
    const Range range = find(table, end, rule.order, rule.bits);
    for (int64_t at = range.start; at < range.stop; at++)
        add(found, 0, (int64_t)number(table.tokens, table.token_bytes, at), ngrams.probabilities[table.codes[at]]);
    const uint64_t hashed = hash(end, rule.order);
    const Slot& counted = find(ngrams.own, hashed);
    const int known = found.size;
    for (int entry = counted.hash == hashed ? counted.first : -1; entry >= 0; entry = ngrams.own.entries[entry].next) {
        const Counted& next = ngrams.own.entries[entry];
        const int place = place_of(found, known, next.token);
        if (place < 0) continue;
        if (place == found.size) {
            found.tokens[place] = next.token;
            found.probs[place] = found.own[place] = 0;
            found.size++;
        }
        found.probs[place] = std::min(found.probs[place] + rule.increment * next.count, rule.max_prob);
    }
}

}  // namespace

void find_successors(const Ngrams& ngrams, const int64_t* context, Successors& found) {
    const Rule& rule = ngrams.rule;
    const int64_t* end = context + rule.order - 1;
    found.size = 0;
    if (rule.literal) return find_literally(ngrams, end, found);
    for (int order = rule.order; order > 1; order--) {  // all at once: memory takes longer than anything else here
        const uint64_t hashed = hash(end, order);
        for (const Counts* counts : {&ngrams.own, &ngrams.shared})
            __builtin_prefetch(counts->slots + first_slot(*counts, hashed));
        const int64_t first = end[1 - order];
        if (first >= 0) __builtin_prefetch(ngrams.tables[rule.order - order].heads + first);
    }
    double left = 1;
    for (int order = rule.order; order > 1; order--) {
        const uint64_t hashed = hash(end, order);
        left = from_counts(ngrams.own, 1, hashed, left, found, true);
        left = from_counts(ngrams.shared, rule.shared_scale, hashed, left, found, false);
        const Table& table = ngrams.tables[rule.order - order];
        const Range range = find(table, end, order, rule.bits);
        const int known = found.size;
        double given = 0;
        for (int64_t at = range.start; at < range.stop; at++) {
            const float p = ngrams.probabilities[table.codes[at]];
            add(found, known, (int64_t)number(table.tokens, table.token_bytes, at), left * p);
            given += p;
        }
        left *= std::max(1 - given, 0.0);
        if (left < LEAST) break;
    }
}

}  // namespace paceline

using namespace paceline;

#pragma GCC visibility push(default)
extern "C" {

// Count once more each n-gram of ids[0 .. size-1] whose last token is at `start` or later.
void paceline_ngrams_learn(const Counts* counts, const int64_t* ids, int64_t size, int64_t start, int shortest,
                           int longest, double weight) {
    for (int64_t end = start; end < size; end++) {
        uint64_t hashed = SEED;
        for (int n = 2; n <= longest && n <= end + 1; n++) {
            hashed = step(hashed, ids[end - n + 1]);
            if (n >= shortest) increment(*counts, hashed, ids[end], weight);
        }
    }
}

// Of each of the places from .. size-1 what may follow, as a text's drafts see it there: tokens, probabilities and
// what its own counts give to them [size - from, MOST_SUCCESSORS]; tokens are -1 after the last. The counts, which know
// ids[0 .. from-1] and have room, learn the rest.
void paceline_ngrams_follow_up(const Ngrams* ngrams, const int64_t* ids, int64_t size, int64_t from, int shortest,
                               int32_t* tokens, float* probs, float* own) {
    const int width = ngrams->rule.order - 1;
    std::vector<int64_t> context(width);
    Successors found;
    for (int64_t end = from; end < size; end++) {
        paceline_ngrams_learn(&ngrams->own, ids, end + 1, end, shortest, ngrams->rule.order, 1);
        for (int back = 0; back < width; back++) context[width - 1 - back] = end >= back ? ids[end - back] : -1;
        find_successors(*ngrams, context.data(), found);
        const int64_t row = (end - from) * MOST_SUCCESSORS;
        for (int place = 0; place < MOST_SUCCESSORS; place++) {
            const bool there = place < found.size;
            tokens[row + place] = there ? (int32_t)found.tokens[place] : -1;
            probs[row + place] = there ? (float)found.probs[place] : 0;
            own[row + place] = there ? (float)found.own[place] : 0;
        }
    }
}

// Fill the empty `to` with the counts of `from` times `factor`, those below `least` left out.
void paceline_ngrams_rebuild(const Counts* from, const Counts* to, double factor, double least) {
    for (int64_t slot = 0; slot < from->slot_count; slot++) {
        const Slot& context = from->slots[slot];
        int64_t last = -1;
        for (int place = context.hash ? context.first : -1; place >= 0; place = from->entries[place].next) {
            const double count = from->entries[place].count * factor;
            if (count < least) continue;
            Slot& copy = find(*to, context.hash);
            if (last < 0) {
                copy.hash = context.hash;
                copy.first = (int32_t)to->used[1];
                to->used[0]++;
            } else {
                to->entries[last].next = (int32_t)to->used[1];
            }
            copy.total = (float)(copy.total + count);
            copy.kinds++;
            last = to->used[1]++;
            to->entries[last] = {from->entries[place].token, (float)count, -1};
        }
    }
}
}
#pragma GCC visibility pop
