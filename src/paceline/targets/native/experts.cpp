// A mixture of experts: every token passes the few that its router chose.
//
// As transformers computes it: softmax over all experts, the largest `chosen` of them (of equal ones the first), and
// the sum in the order of the experts' numbers. Tokens are grouped by expert, each of which reads its weights once. The
// steps and their jobs are the same in number whatever was chosen: a thread that was away must still count them alike.
#include <algorithm>
#include <cstring>

#include "activations.h"
#include "attention.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {
namespace {

struct Groups {  // inside the workspace. A *place* is a token at one of its experts; they lie expert by expert
    int lds, ldx, ldi, ldw, places, groups;  // groups: the most that there can be
    float *scores, *weights, *gathered, *wide, *inner, *results, *gate;
    int32_t *expert, *place, *token;  // of token x choice: its expert, its place; of a place: its token
    int32_t *active, *start;          // of a group: its expert, its first place; one more for the end
    int32_t* next;                    // of an expert: where its next token goes
    size_t floats;

    Groups(const Model& m, int tokens, float* workspace) {
        lds = round_up(m.experts, PANEL), ldx = row_stride(m.hidden), ldi = row_stride(m.expert_inner);
        ldw = wide_stride(m, m.expert_inner);
        places = tokens * m.chosen, groups = std::min(places, m.experts);
        float* at = workspace;
        const auto take = [&](size_t count) { return at += (count + 15) / 16 * 16, at - (count + 15) / 16 * 16; };
        const auto take_whole = [&](size_t count) { return (int32_t*)take(count); };
        scores = take((size_t)tokens * lds), gate = take((size_t)tokens * PANEL);
        weights = take(places), gathered = take((size_t)places * ldx);
        wide = take((size_t)places * ldw);
        inner = take((size_t)places * ldi), results = take((size_t)places * ldx);
        expert = take_whole(places), place = take_whole(places), token = take_whole(places);
        active = take_whole(groups + 1), start = take_whole(groups + 1), next = take_whole(m.experts + 1);
        floats = at - workspace;
    }
};

// The experts of one token by number, and their weights; `scores` become e^(score - the highest).
void choose(const Model& m, float* scores, int32_t* expert, float* weights) {
    float highest, total, sum = 0.0f;
    soften(scores, 0, m.experts, 1.0f, highest, total);
    int count = 0;
    for (int e = 0; e < m.experts; e++) {  // from the largest weight on
        int at = count;
        while (at > 0 && scores[e] > scores[expert[at - 1]]) at--;
        if (at == m.chosen) continue;
        count = std::min(count + 1, m.chosen);
        std::memmove(expert + at + 1, expert + at, sizeof(int32_t) * (count - 1 - at));
        expert[at] = e;
    }
    for (int i = 0; i < m.chosen; i++) sum += scores[expert[i]];
    std::sort(expert, expert + m.chosen);
    for (int i = 0; i < m.chosen; i++) weights[i] = scores[expert[i]] / (m.normalised ? sum : total);
}

// Places, expert by expert: one thread's work, as it is little.
void group(const Model& m, const Groups& g) {
    std::fill_n(g.next, m.experts + 1, 0);
    for (int i = 0; i < g.places; i++) g.next[g.expert[i] + 1]++;
    int groups = 0;
    for (int e = 0; e < m.experts; e++) {
        if (g.next[e + 1]) g.active[groups] = e, g.start[groups++] = g.next[e];
        g.next[e + 1] += g.next[e];
    }
    for (; groups <= g.groups; groups++) g.start[groups] = g.places;
    for (int i = 0; i < g.places; i++) {
        g.place[i] = g.next[g.expert[i]]++;
        g.token[g.place[i]] = i / m.chosen;
    }
}

}  // namespace

size_t experts_floats(const Model& model, int tokens) {
    return model.experts ? Groups(model, tokens, nullptr).floats : 0;
}

void experts(Team& team, const Model& m, const Layer& layer, int tokens, const float* inner, int ldi,
             float* workspace, float* x, int ldx) {
    const Groups g(m, tokens, workspace);
    const Experts& of = layer.experts;
    gemm(team, of.router, x, ldx, tokens, g.scores, g.lds, STORE);
    if (of.shared_gate.outputs) gemm(team, of.shared_gate, x, ldx, tokens, g.gate, PANEL, STORE);
    team.each(tokens, 4, [&](int t, int) {
        choose(m, g.scores + (size_t)t * g.lds, g.expert + t * m.chosen, g.weights + t * m.chosen);
    });
    team.each(1, 1, [&](int, int) { group(m, g); });
    team.each(g.places, 8, [&](int i, int) {
        std::memcpy(g.gathered + (size_t)i * g.ldx, x + (size_t)g.token[i] * ldx, sizeof(float) * g.ldx);
    });
    const bool shared = layer.down.outputs;
    if (shared) gemm(team, layer.down, inner, ldi, tokens, x, ldx, STORE);
    const int shares = std::max(1, 8 * team.threads / g.groups);  // jobs of an expert's product
    const auto product = [&](const Matrix* of_expert, const float* from, int ldf, float* to, int ldt, Epilogue epilogue) {
        team.each(g.groups * shares, 1, [&](int i, int) {
            const int group = i / shares, first = g.start[group], rows = g.start[group + 1] - first;
            if (rows)
                gemm_share(of_expert[g.active[group]], from + (size_t)first * ldf, ldf, rows, to + (size_t)first * ldt,
                           ldt, epilogue, i % shares, shares);
        });
    };
    if (swiglu(m)) {
        product(of.gate_up, g.gathered, g.ldx, g.inner, g.ldi, SWIGLU);
    } else {
        product(of.gate_up, g.gathered, g.ldx, g.wide, g.ldw, STORE);
        activate_rows(team, m, g.wide, g.ldw, g.places, m.expert_inner, g.inner, g.ldi);
    }
    round_inputs(team, of.down[0], g.inner, g.ldi, g.places);
    product(of.down, g.inner, g.ldi, g.results, g.ldx, STORE);
    team.each(tokens, 1, [&](int t, int) {
        float* to = x + (size_t)t * ldx;
        const float gate =
            of.shared_gate.outputs ? 1.0f / (1.0f + exp(splat<vf>(-g.gate[(size_t)t * PANEL]))[0]) : 1.0f;
        for (int d = 0; d < m.hidden; d += LANES) {
            vf sum = {};
            for (int i = t * m.chosen; i < (t + 1) * m.chosen; i++)
                sum += load<vf>(g.results + (size_t)g.place[i] * g.ldx + d) * splat<vf>(g.weights[i]);
            if (shared) sum += load<vf>(to + d) * splat<vf>(gate);
            store(to + d, sum);
        }
    });
}

}  // namespace paceline::PACELINE_ISA
