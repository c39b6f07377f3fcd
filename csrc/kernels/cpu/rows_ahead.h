// Which rows the backward pass asks for ahead: those that a query block is going to write, and
// those that come next. The rows of one head lie far apart in the usual layouts, and each head
// begins elsewhere, which the hardware does not foresee.
#pragma once

#include "kernels/cpu/pack.h"
#include "kernels/cpu/turns.h"

namespace attention_ext::kernels {
namespace ATTENTION_EXT_TIER {

class RowsAhead {
 public:
  AE_INLINE RowsAhead(const BackwardParams& params, Ahead& rows) : p(params), ahead(rows) {}

  // For a query block at work with the keys that its item owns.
  AE_INLINE void ask(const Visit& at, KeyRange owned, int64_t next_item, int64_t heads_at_once) {
    const Problem& problem = at.problem;
    const int64_t next = at.i0 + at.nq, group = p.group();
    const bool last_head = (at.h + 1) % group == 0;
    if (!single_key_block(problem)) {
      if (at.place + 1 == at.places) query_grads(problem, at.h, at.i0, at.nq);
      if (next == problem.q_length && last_head) key_grads(problem, at.h / group, owned);
    }
    if (next < problem.q_length) {
      queries(problem, at.h, next);
    } else if (!last_head) {
      if (!p.windowed()) queries(problem, at.h + 1, 0);
    } else if (next_item >= 0) {
      const auto [n, g, r] = range_index(p, next_item, heads_at_once);
      item(p.problem(n), g, r);
    }
  }

 private:
  const BackwardParams& p;
  Ahead& ahead;

  AE_INLINE void item(const Problem& problem, int64_t g, int64_t r) {
    const KeyRange keys = KeyRanges(p, problem.k_length).keys(r);
    const int64_t row = problem.k_begin + keys.begin, count = keys.end - keys.begin;
    rows<false>(p.key, problem, g, row, count, p.qk_size);
    rows<false>(p.value, problem, g, row, count, p.v_size);
    if (single_key_block(problem)) key_grads(problem, g, keys);
    if (!p.windowed()) queries(problem, g * p.group(), 0);
  }
  // A query block that comes next.
  AE_INLINE void queries(const Problem& problem, int64_t h, int64_t i0) {
    const int64_t nq = smaller(query_block(problem.q_length), problem.q_length - i0);
    const int64_t row = problem.q_begin + i0;
    rows<false>(p.query, problem, h, row, nq, p.qk_size);
    rows<false>(p.grad_output, problem, h, row, nq, p.v_size);
    rows<false>(p.output, problem, h, row, nq, p.v_size);
    if (single_key_block(problem)) query_grads(problem, h, i0, nq);
  }
  AE_INLINE void query_grads(const Problem& problem, int64_t h, int64_t i0, int64_t nq) {
    rows<true>(p.grad_query, problem, h, problem.q_begin + i0, nq, p.qk_size);
  }
  AE_INLINE void key_grads(const Problem& problem, int64_t g, KeyRange keys) {
    const int64_t row = problem.k_begin + keys.begin, count = keys.end - keys.begin;
    rows<true>(p.grad_key, problem, g, row, count, p.qk_size);
    rows<true>(p.grad_value, problem, g, row, count, p.v_size);
  }
  template <bool kWrite>
  AE_INLINE void rows(const View& view, const Problem& problem, int64_t head, int64_t row,
                      int64_t count, int64_t columns) {
    if (!view.defined()) return;
    prefetch_rows<kWrite>(ahead, Rows(view, problem.batch, head, row, 0), count, columns);
  }
};

}  // namespace ATTENTION_EXT_TIER
}  // namespace attention_ext::kernels
