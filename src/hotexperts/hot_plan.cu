// What a context does with each node of a graph. See hot_context.h.
#include "hot_context.h"

#include "ggml-backend-impl.h"
#include "hot_buffer.h"
#include "mmvq.cuh"

#include <set>

namespace hx {

namespace {

// A batch streams what it uses when it selects each expert so often on average, and all experts from the second number on.
constexpr int USED_SELECTIONS = 2;
constexpr int STREAM_SELECTIONS = 20;

bool is_noop(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

}  // namespace

bool is_ours(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT_ID && node->src[0]->buffer && hot_buffer_device(node->src[0]->buffer->buft) >= 0;
}

// Whether the nodes from i on are gate, up, SwiGLU, down of one layer, in the form that the lanes compute.
bool hot_context::match_lanes(const ggml_cgraph * cgraph, int i, action & a, phx_bypass & why) {
    const cache_layer & l = *cache->layers[size_t(a.layer)];
    std::vector<int> at;
    for (int j = i; j < cgraph->n_nodes && at.size() < 4; j++) {
        if (!is_noop(cgraph->nodes[j])) {
            at.push_back(j);
        }
    }
    why = PHX_BYPASS_SHAPE;
    if (!l.has_lanes) {
        why = l.config.gate ? PHX_BYPASS_TYPE : PHX_BYPASS_SHAPE;
        return false;
    }
    if (at.size() < 4) {
        return false;
    }
    ggml_tensor * first = cgraph->nodes[at[0]];
    ggml_tensor * second = cgraph->nodes[at[1]];
    ggml_tensor * glu = cgraph->nodes[at[2]];
    ggml_tensor * down = cgraph->nodes[at[3]];
    if (second->op != GGML_OP_MUL_MAT_ID || glu->op != GGML_OP_GLU || down->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    ggml_tensor * gate = first->src[0] == l.config.gate ? first : second;
    ggml_tensor * up = gate == first ? second : first;
    const ggml_tensor * x = first->src[1];
    const ggml_tensor * ids = first->src[2];
    if (gate->src[0] != l.config.gate || up->src[0] != l.config.up || down->src[0] != l.config.down || second->src[1] != x ||
        second->src[2] != ids || down->src[2] != ids || down->src[1] != glu || glu->src[0] != gate || glu->src[1] != up ||
        ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU || ggml_get_op_params_i32(glu, 1) != 0) {
        return false;
    }
    for (int k = 0; k < 3; k++) {  // nothing else reads what lies between
        if (!ggml_node_has_n_uses(cgraph, at[size_t(k)], 1) || (cgraph->nodes[at[size_t(k)]]->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            return false;
        }
    }
    if (x->type != GGML_TYPE_F32 || x->ne[1] != 1 || x->ne[3] != 1 || x->nb[0] != sizeof(float) || ids->type != GGML_TYPE_I32 ||
        ids->nb[0] != sizeof(int32_t) || down->type != GGML_TYPE_F32 || down->nb[0] != sizeof(float) || !ggml_is_contiguous(glu) ||
        ids->ne[0] * MAX_LANE_TOKENS > MAX_ROWS) {
        return false;
    }
    const int64_t n_tokens = x->ne[2];
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    int64_t limit = std::min<int64_t>(MAX_LANE_TOKENS, cache->config.bypass_tokens - 1);
    for (const ggml_tensor * w : { l.config.gate, l.config.up, l.config.down }) {
        limit = std::min<int64_t>(limit, get_mmvq_mmid_max_batch(w->type, cc));
    }
    if (n_tokens > limit) {
        why = PHX_BYPASS_BATCH;
        return false;
    }
    if (cache->has_failed()) {
        why = PHX_BYPASS_FAILED;
        return false;
    }
    a.how = path::lanes;
    a.nodes = { gate, up, glu, down };
    a.n_nodes = at[3] - i + 1;
    return true;
}

void hot_context::make_plan(const ggml_cgraph * cgraph) {
    plan = std::make_shared<graph_plan>();
    std::set<int32_t> posted;             // layers: a post has room for one region
    const ggml_tensor * last_ids = nullptr;
    const ggml_tensor * ids_before = nullptr;
    std::set<std::pair<int32_t, const ggml_tensor *>> counted;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        ggml_tensor * node = cgraph->nodes[i];
        if (!is_ours(node) || ggml_is_empty(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;  // upstream skips what is empty: the last layer of a batch whose logits nobody wants
        }
        const ggml_tensor * w = node->src[0];
        const ggml_tensor * ids = node->src[2];
        action a;
        a.nodes = { node };
        hot_cache * found = hot_cache::find(w, a.layer, a.matrix);
        if (found != cache) {
            a.layer = -1;
        }
        phx_bypass why = a.layer < 0 ? PHX_BYPASS_NO_CACHE : PHX_BYPASS_SHAPE;
        const bool is_new = a.layer >= 0 && posted.insert(a.layer).second;
        for (expected_post & p : plan->posts) {
            p.is_reused = p.is_reused || (p.layer == a.layer && !is_new);
        }
        if (is_new && match_lanes(cgraph, i, a, why)) {
            plan->posts.push_back({ a.layer, true });
            const int skip = a.n_nodes - 1;
            plan->actions.emplace(node, std::move(a));
            i += skip;
            continue;
        }
        const int64_t n_tokens = ids->ne[1];
        const int64_t n_expert = w->ne[2];
        const int64_t bypass = cache ? cache->config.bypass_tokens : 64;
        const bool is_pinned = hot_buffer_is_pinned(w->buffer);
        const int64_t n_selections = n_tokens * ids->ne[0];
        const bool uses_all = n_selections >= STREAM_SELECTIONS * n_expert;
        if (n_tokens >= bypass && (uses_all || (is_pinned && n_selections >= USED_SELECTIONS * n_expert))) {
            a.how = path::stream;
            a.only_used = !uses_all;
        } else {
            a.how = is_pinned ? path::gather : path::host;
        }
        a.has_new_ids = ids != ids_before;
        ids_before = ids;
        a.is_first = is_new && ids->ne[0] <= MAX_ROWS;
        a.needs_mark = a.is_first || ids != last_ids;
        last_ids = a.how == path::gather || a.is_first ? ids : nullptr;
        if (a.is_first) {
            plan->posts.push_back({ a.layer, false });
        }
        if (counted.insert({ a.layer, ids }).second) {
            plan->bypassed[why]++;
        }
        plan->scratch_bytes = std::max(plan->scratch_bytes, scratch_stride(w) * size_t(n_expert));
        plan->n_expert_max = std::max(plan->n_expert_max, int32_t(n_expert));
        plan->actions.emplace(node, std::move(a));
    }
    // What is copied ahead would be overwritten by what is gathered before it. After the last stream it would not: the last
    // layer of a prompt often has one token left.
    bool gathers = false;
    bool conflicts = false;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const auto it = plan->actions.find(cgraph->nodes[i]);
        if (it == plan->actions.end()) {
            continue;
        }
        gathers = gathers || it->second.how == path::gather || it->second.how == path::host;
        if (it->second.how == path::stream) {
            plan->streams.push_back(&it->second);
            conflicts = conflicts || gathers;
        }
    }
    if (conflicts) {
        stop_streaming();
    }
}

// What would be streamed is brought when it is needed.
void hot_context::stop_streaming() {
    for (auto & [node, a] : plan->actions) {
        if (a.how == path::stream) {
            a.how = hot_buffer_is_pinned(node->src[0]->buffer) ? path::gather : path::host;
            a.needs_mark = true;
        }
    }
    plan->streams.clear();
}

}  // namespace hx
