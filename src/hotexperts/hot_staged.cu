// The staged path of a context: experts are brought into VRAM, then upstream's own kernels run. See hot_context.h.
#include "hot_context.h"
#include "hot_copy.h"

#include "host_memory.h"
#include "hot_buffer.h"

#include <algorithm>
#include <set>

namespace hx {

namespace {

constexpr size_t STRIDE_ALIGNMENT = 16;  // bytes, for the gather kernel's wide copies

// Copies consecutive experts of n bytes to places that are `stride` apart.
void copy_experts(char * to, size_t stride, const char * from, size_t n, size_t count, bool pinned, cudaStream_t stream) {
    if (stride == n) {
        CUDA_CHECK(pinned ? copy_pinned(to, from, count * n, stream) : cudaMemcpyAsync(to, from, count * n, cudaMemcpyHostToDevice, stream));
        return;
    }
    while (count > 0) {
        const size_t whole = pinned ? pinned_extent(from, count * n) / n : count;  // a copy must not cross two registered pieces
        if (whole > 0) {
            CUDA_CHECK(cudaMemcpy2DAsync(to, stride, from, n, n, whole, cudaMemcpyHostToDevice, stream));
        } else {
            CUDA_CHECK(copy_pinned(to, from, n, stream));
        }
        const size_t done = std::max(whole, size_t(1));
        to += done * stride;
        from += done * n;
        count -= done;
    }
}

}  // namespace

size_t scratch_stride(const ggml_tensor * weights) {
    const size_t block = ggml_type_size(weights->type);
    const size_t padding = weights->ne[0] % 512 ? ggml_row_size(weights->type, 512 - weights->ne[0] % 512) : 0;
    const size_t blocks = (weights->nb[2] + padding + block - 1) / block;
    return (blocks + STRIDE_ALIGNMENT - 1) / STRIDE_ALIGNMENT * STRIDE_ALIGNMENT * block;
}

ggml_tensor with_data(const ggml_tensor * t, void * data, size_t stride, int64_t n_expert) {
    ggml_tensor shadow = *t;
    shadow.data = data;
    shadow.ne[2] = n_expert;
    shadow.nb[2] = stride;
    shadow.nb[3] = stride * size_t(n_expert);
    return shadow;
}

const slot_matrix * hot_context::matrix_of(const action & a) const {
    return a.layer >= 0 ? &cache->layers[size_t(a.layer)]->matrices[size_t(a.matrix)] : nullptr;
}

void hot_context::run_staged(const action & a, mul_mat_id_fn upstream) {
    ggml_tensor * node = a.nodes[0];
    const ggml_tensor * w = node->src[0];
    const size_t stride = scratch_stride(w);
    char * bytes = scratch[0];
    if (a.needs_mark) {
        mailbox m = a.is_first ? mail : mailbox{};  // without posts nothing is posted
        launch_mark(m, shape_of(a, node), int32_t(w->ne[2]), used, ctx.stream());
        CUDA_CHECK(cudaGetLastError());
    }
    if (a.how == path::stream) {
        GGML_ASSERT(plan->streams.at(stream_position) == &a);
        const size_t index = stream_position++;
        if (!can_begin_ahead(index)) {
            selected = selection_of(node->src[2]);
            begin_stream(index);
        }
        if (index + 1 < plan->streams.size() && can_begin_ahead(index + 1)) {
            begin_stream(index + 1);
        }
        bytes = scratch[index % 2];
        if (matrix_of(a)) {
            gather(a, bytes, stride, nullptr, nullptr);  // the residents, while the others are copied
        }
        CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), copied[index % 2], 0));
    } else if (a.how == path::gather) {
        gather(a, bytes, stride, used, w->data);
    } else {
        copy_from_host(a, bytes, stride);
    }
    ggml_tensor staged = with_data(w, bytes, stride, w->ne[2]);
    ggml_tensor shadow = *node;
    shadow.src[0] = &staged;
    upstream(ctx, &shadow);
    if (a.how == path::stream) {
        CUDA_CHECK(cudaEventRecord(consumed[(stream_position - 1) % 2], ctx.stream()));
    }
}

void hot_context::gather(const action & a, char * to, size_t stride, const int32_t * marked, const void * host) {
    const ggml_tensor * w = a.nodes[0]->src[0];
    const slot_matrix * m = matrix_of(a);
    gather_shape g = {};
    g.used = marked;
    g.table = m ? mail.tables + int64_t(a.layer) * mail.table_size : nullptr;
    g.host = static_cast<const char *>(host);
    g.slots = m ? m->slots : nullptr;
    g.scratch = to;
    g.n_expert = int32_t(w->ne[2]);
    g.expert_bytes = int64_t(w->nb[2]);
    g.slot_stride = g.expert_bytes;
    g.stride = int64_t(stride);
    launch_gather(g, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

// The experts that a batch uses, when its kernels up to here are over.
std::set<int32_t> hot_context::selection_of(const ggml_tensor * ids) const {
    std::vector<char> bytes(ggml_nbytes(ids));
    CUDA_CHECK(cudaMemcpyAsync(bytes.data(), ids->data, bytes.size(), cudaMemcpyDeviceToHost, ctx.stream()));
    CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    std::set<int32_t> experts;
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            experts.insert(*reinterpret_cast<const int32_t *>(&bytes[size_t(t) * ids->nb[1] + size_t(k) * ids->nb[0]]));
        }
    }
    return experts;
}

void hot_context::copy_from_host(const action & a, char * to, size_t stride) {
    const ggml_tensor * w = a.nodes[0]->src[0];
    const size_t n = size_t(w->nb[2]);
    const slot_matrix * m = matrix_of(a);
    for (const int32_t e : selection_of(a.nodes[0]->src[2])) {
        char * target = to + size_t(e) * stride;
        const int32_t slot = m ? tables[size_t(a.layer * mail.table_size + e)] : -1;
        if (slot >= 0) {
            CUDA_CHECK(cudaMemcpyAsync(target, m->slots + size_t(slot) * n, n, cudaMemcpyDeviceToDevice, ctx.stream()));
        } else {
            CUDA_CHECK(cudaMemcpyAsync(target, static_cast<const char *>(w->data) + size_t(e) * n, n, cudaMemcpyHostToDevice, ctx.stream()));
        }
        CUDA_CHECK(cudaMemsetAsync(target + n, 0, stride - n, ctx.stream()));
    }
}

// Whether what a streamed product needs is known before it is its turn.
bool hot_context::can_begin_ahead(size_t index) const {
    return !plan->streams[index]->only_used || !plan->streams[index]->has_new_ids;
}

// Enqueues the copies of one tensor of the graph's streamed ones, as soon as its half of the scratch is free.
void hot_context::begin_stream(size_t index) {
    const action & a = *plan->streams[index];
    const ggml_tensor * w = a.nodes[0]->src[0];
    const size_t n = size_t(w->nb[2]);
    const size_t stride = scratch_stride(w);
    char * to = scratch[index % 2];
    const char * from = static_cast<const char *>(w->data);
    const int32_t n_expert = int32_t(w->ne[2]);
    const bool pinned = hot_buffer_is_pinned(w->buffer);
    const auto is_copied = [&](int32_t e) {
        const bool is_resident = a.layer >= 0 && tables[size_t(a.layer * mail.table_size + e)] >= 0;
        return !is_resident && (!a.only_used || selected.count(e));
    };
    if (index >= 2) {
        CUDA_CHECK(cudaStreamWaitEvent(copy_stream, consumed[index % 2], 0));
    }
    for (int32_t e = 0; e < n_expert;) {
        int32_t end = e;
        while (end < n_expert && is_copied(end)) {
            end++;
        }
        copy_experts(to + size_t(e) * stride, stride, from + size_t(e) * n, n, size_t(end - e), pinned, copy_stream);
        e = end + 1;
    }
    if (stride > n) {
        CUDA_CHECK(cudaMemset2DAsync(to + n, stride, 0, stride - n, size_t(n_expert), copy_stream));
    }
    CUDA_CHECK(cudaEventRecord(copied[index % 2], copy_stream));
}

}  // namespace hx
