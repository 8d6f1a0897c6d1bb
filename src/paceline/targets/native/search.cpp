// The drafter trigram's search: see drafters/trigram/search.py and many.py for what and why.
#include <algorithm>
#include <cmath>

#include "guide.h"

namespace paceline {
namespace {

enum Rank : int32_t { BY_PATH, BY_LEVEL, BY_VISITS, BY_VALUE };

struct Plan {
    double c1, c2, min_score;
    int32_t iterations, depth, candidates, nodes, rank, literal;
};

struct Node {
    int32_t token, parent, depth;
    int32_t first, width;  // of its children, which stand side by side; width -1: not looked up yet
    float prior, path;
    int32_t visits;
    float value;
    int32_t place, extended;
};

struct Waiting {
    int32_t node;
    float worth;
};

struct Arena {
    Node* nodes;
    Waiting* heap;
    int64_t* context;  // [n - 1]
    int64_t *drawn_tokens, *drawn_parents;
    double* scores;
};

double uniform(uint64_t& state) {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

double worth(const Node& node, int rank) {  // never less than its children's
    if (rank == BY_LEVEL) return (double)node.path - node.depth;
    if (rank == BY_VISITS) return (double)node.path + node.visits;
    if (rank == BY_VALUE) return node.path + node.value;
    return node.path;
}

void push(Waiting* heap, int size, int node, double worth) {
    int at = size;
    for (; at > 0 && heap[(at - 1) >> 1].worth < worth; at = (at - 1) >> 1) heap[at] = heap[(at - 1) >> 1];
    heap[at] = {node, (float)worth};
}

int pop(Waiting* heap, int size) {  // takes the best node off, of which `size` stay
    const int top = heap[0].node;
    const float worth = heap[size].worth;
    int at = 0;
    for (int child = 1; child < size; child = 2 * child + 1) {
        if (child + 1 < size && heap[child + 1].worth > heap[child].worth) child++;
        if (heap[child].worth <= worth) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = heap[size];
    return top;
}

struct Search {
    const Ngrams& ngrams;
    const Plan& plan;
    const Arena& arena;
    const int64_t* tail;  // the text's last n - 1 tokens
    const Guide* guide;   // null: what follows these is told by n-grams alone
    const float* hidden;  // the target's state that the last token was told by
    Node* nodes;
    int width;  // n - 1
    int used = 1;
    Successors found;

    Search(const Ngrams& ngrams, const Plan& plan, const Arena& arena, const int64_t* tail, const Guide* guide,
           const float* hidden)
        : ngrams(ngrams), plan(plan), arena(arena), tail(tail), guide(guide), hidden(hidden), nodes(arena.nodes), width(ngrams.rule.order - 1) {
        nodes[0] = {nodes[0].token, -1, 0, nodes[0].first, -1, nodes[0].prior, 1, 0, 0, 0, 0};
    }

    void load_context(int node) {
        int at = width - 1;
        for (; node > 0 && at >= 0; at--) {
            arena.context[at] = nodes[node].token;
            node = nodes[node].parent;
        }
        for (int back = 0; back <= at; back++) arena.context[at - back] = tail[width - 1 - back];
    }

    void expand(int node) {
        load_context(node);
        find_successors(ngrams, arena.context, found);
        if (guide && node == 0) kernels().guide(*guide, &hidden, tail + width - 1, &found, 1);
        Node& parent = nodes[node];
        parent.first = used;
        parent.width = found.size;
        for (int place = 0; place < found.size; place++) {
            Node& child = nodes[used + place];
            child.token = (int32_t)found.tokens[place];
            child.parent = node;
            child.depth = parent.depth + 1;
            child.width = -1;
            child.prior = (float)found.probs[place];
            child.path = (float)(parent.path * found.probs[place]);
            child.visits = child.extended = 0;
            child.value = 0;
        }
        used += found.size;
    }

    int select(int node) const {  // eq. 2 and 3
        const int first = nodes[node].first, stop = first + nodes[node].width;
        int64_t visits = 0;
        for (int child = first; child < stop; child++) visits += nodes[child].visits;
        double exploration = plan.c1 + std::log(((double)visits + plan.c2 + 1) / plan.c2);
        exploration *= std::sqrt((double)std::max(visits, (int64_t)1));
        int chosen = first;
        double best = -1;
        for (int child = first; child < stop; child++) {
            const int n = nodes[child].visits;
            if (n == 0 && plan.literal) return child;
            const double q = n > 0 ? (double)nodes[child].value / n : 0;
            const double score = q + exploration * nodes[child].prior / (1 + n);
            if (score > best) {
                chosen = child;
                best = score;
            }
        }
        return chosen;
    }

    double simulate(int node, uint64_t& random) {
        load_context(node);
        double path = nodes[node].path, reward = 0;
        const int left = plan.depth - nodes[node].depth;
        for (; node > 0; node = nodes[node].parent) reward += plan.literal ? nodes[node].prior : nodes[node].path;
        for (int turn = 0; turn < left; turn++) {
            find_successors(ngrams, arena.context, found);
            if (found.size == 0) break;
            double rest = 0;
            for (int other = 0; other < found.size; other++) rest += found.probs[other];
            rest *= uniform(random);
            int place = 0;
            for (; place < found.size - 1 && rest >= found.probs[place]; place++) rest -= found.probs[place];
            path *= found.probs[place];
            reward += plan.literal ? found.probs[place] : path;
            for (int at = 0; at + 1 < width; at++) arena.context[at] = arena.context[at + 1];
            arena.context[width - 1] = found.tokens[place];
        }
        return plan.literal ? 1 + reward : reward / plan.depth;
    }

    void iterate(uint64_t& random) {
        int node = 0;
        while (nodes[node].width > 0 && nodes[node].depth < plan.depth) node = select(node);
        if (nodes[node].width < 0 && nodes[node].depth < plan.depth) {
            expand(node);
            if (nodes[node].width > 0) node = nodes[node].first + (plan.literal ? nodes[node].width - 1 : 0);
        }
        const double reward = simulate(node, random);
        for (; node >= 0; node = nodes[node].parent) {
            nodes[node].visits++;
            nodes[node].value = (float)(nodes[node].value + reward);
        }
    }

    int draw() {
        int drawn = 0, leaves = 0, waiting = 0, node = 0;
        while (drawn < plan.nodes) {
            if (nodes[node].depth < plan.depth) {
                if (nodes[node].width < 0) expand(node);
                const int first = nodes[node].first, stop = first + nodes[node].width;
                for (int child = first; child < stop; child++)
                    if (nodes[child].path >= plan.min_score)
                        push(arena.heap, waiting++, child, worth(nodes[child], plan.rank));
            }
            node = -1;
            while (waiting > 0 && node < 0) {
                node = pop(arena.heap, --waiting);
                const int parent = nodes[node].parent;
                if (parent == 0 || nodes[parent].extended) {  // a continuation of its own
                    if (leaves < plan.candidates) leaves++;
                    else node = -1;
                }
            }
            if (node < 0) break;
            Node& parent = nodes[nodes[node].parent];
            parent.extended = 1;
            arena.drawn_tokens[drawn] = nodes[node].token;
            arena.drawn_parents[drawn] = parent.place;
            arena.scores[drawn] = nodes[node].path;
            nodes[node].place = ++drawn;
        }
        return drawn;
    }
};

// The likeliest of what was `found` after a context, then of what follows that, and so on; returns how many there are.
int64_t follow(const Ngrams& ngrams, int64_t* context, Successors& found, int64_t depth, int64_t* tokens,
               double* scores) {
    const int width = ngrams.rule.order - 1;
    double path = 1;
    for (int64_t size = 0; size < depth; size++) {
        if (size > 0) find_successors(ngrams, context, found);
        if (found.size == 0) return size;
        const int best = (int)(std::max_element(found.probs, found.probs + found.size) - found.probs);
        path *= found.probs[best];
        tokens[size] = found.tokens[best];
        scores[size] = path;
        std::copy(context + 1, context + width, context);
        context[width - 1] = found.tokens[best];
    }
    return depth;
}

}  // namespace
}  // namespace paceline

using namespace paceline;

#pragma GCC visibility push(default)
extern "C" {

// `count` rows in 8 bits, `stride` apart, each in a unit of its own: what a guide reads of the target.
void paceline_guide_rows(const float* rows, int64_t count, int size, int stride, int8_t* to, float* units) {
#pragma omp parallel for
    for (int64_t row = 0; row < count; row++)
        kernels().round_row(rows + row * size, size, to + row * stride, units[row]);
}

size_t paceline_guide_floats(int hidden, int rank, int inner) { return guide_floats(hidden, rank, inner); }

// A draft after the last n - 1 tokens, into the arena; returns how many nodes it has. With a guide, and the hidden
// state that the last of them was told by, it says which of the first tokens to expect.
int paceline_ngrams_grow(const Ngrams* ngrams, const Plan* plan, const Arena* arena, const int64_t* tail,
                         uint64_t* random, const Guide* guide, const float* hidden) {
    Search search(*ngrams, *plan, *arena, tail, guide, hidden);
    for (int turn = 0; turn < plan->iterations; turn++) search.iterate(*random);
    return search.draw();
}

// After each text's context [n - 1], overwritten, the likeliest token again and again, `depth` at most: tokens and
// scores [texts, depth]. `own`: each text's counts, in place of those of `ngrams`. With a guide, `hidden` has for each
// text the state that its last token was told by, or null.
void paceline_ngrams_follow(const Ngrams* ngrams, const Counts* own, int64_t* contexts, int64_t texts, int64_t depth,
                            int64_t* tokens, double* scores, int64_t* sizes, const Guide* guide,
                            const float* const* hidden) {
    Ngrams each = *ngrams;
    Successors found[GUIDED];
    int64_t last[GUIDED];
    const int width = each.rule.order - 1;
    for (int64_t first = 0; first < texts; first += GUIDED) {
        const int count = (int)std::min((int64_t)GUIDED, texts - first);
        for (int at = 0; at < count; at++) {
            int64_t* context = contexts + (first + at) * width;
            each.own = own[first + at];
            last[at] = context[width - 1];
            find_successors(each, context, found[at]);
        }
        if (guide) kernels().guide(*guide, hidden + first, last, found, count);
        for (int64_t at = 0, text = first; at < count; at++, text++) {
            each.own = own[text];
            int64_t* context = contexts + text * width;
            sizes[text] = follow(each, context, found[at], depth, tokens + text * depth, scores + text * depth);
        }
    }
}
}
#pragma GCC visibility pop
