"""torch.nn.MultiheadAttention with every call running the fused operator.

Used by models and by replace.py. The projections are torch's linear; everything between them is
torch.ops.attention_ext.attention. Imports functional (for the dropout state) and its own helpers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_ext import _ops
from attention_ext._module_checks import (
    check_mask_dtype,
    check_shapes,
    checked_kv_heads,
    checked_window,
)
from attention_ext._module_masks import NO_WINDOW, Masks, Window, translate_masks
from attention_ext._nested import beyond, nest_like, nested_lengths
from attention_ext.functional import make_rng_state

__all__ = ["MultiheadAttention"]

# torch numbers hooks from 0 in every process: a key of -1 never meets a user's hook, not even
# after unpickling elsewhere.
_HOOK_KEY = -1


def _always_call_forward(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing. Its presence makes TransformerEncoderLayer call the module.

    In evaluation that layer reads the weights of `self_attn` and calls one torch op instead of the
    module, unless some submodule has a forward hook. A module-level function pickles and copies.
    """


class MultiheadAttention(nn.MultiheadAttention):
    r"""Fused multi-head attention, in place of :class:`torch.nn.MultiheadAttention`.

    Constructor, parameters (the same ones for the same seed), ``state_dict`` keys, forward
    signature, results and error types are torch's, and an instance is a
    :class:`torch.nn.MultiheadAttention`. The differences:

    - Every call is fused: training or evaluation, any mask, with or without weights. The result
      does not depend on ``need_weights`` or the grad mode. Averaged weights are made without
      holding one matrix per head.
    - A query that sees no key gets zeros before ``out_proj`` and zero weights (torch: NaN with
      ``need_weights=True``) and adds nothing to any gradient.
    - ``is_causal=True`` works without a mask; a given ``attn_mask`` wins over it. Keys that
      ``add_bias_kv`` and ``add_zero_attn`` append stay visible under masks, ``is_causal`` and
      ``window``.
    - Bool and float masks may be mixed, without a warning.

    ``torch.compile`` and ``torch.export`` work; ``torch.jit.script``, which torch has deprecated,
    raises.

    Args:
        embed_dim: size of the embeddings, split over the heads.
        num_heads: number of query heads.
        dropout: probability of dropping an attention weight in training, rounded to 1/65536.
        bias: whether the projections have a bias.
        add_bias_kv: append one learned key and value to every sequence.
        add_zero_attn: append one key and value of zeros to every sequence.
        kdim, vdim: sizes of the ``key`` and ``value`` embeddings. Default: ``embed_dim``.
        batch_first: inputs and output are (N, L, E) instead of (L, N, E).
        device, dtype: of the parameters.

    Keyword args:
        num_kv_heads: number of key/value heads, a divisor of ``num_heads``; consecutive query heads
            share one. If smaller, ``in_proj_weight`` is
            (embed_dim + 2 * num_kv_heads * head_dim, embed_dim). Default: ``num_heads``.
        window: ``(left, right)``: how many keys before and after its own position a query sees;
            None means no limit on that side. On top of all masks. Default: no window.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
        sinks: adds a parameter ``sinks`` (num_heads), zeros at first: per head, the logit of one
            more entry in the softmax that has no value.
        alibi: adds linear position biases with the usual geometric slopes, for any number of
            heads. They are constants and not in the ``state_dict``. Not together with appended
            keys, which have no position.

    Raises:
        ValueError: sizes not positive, ``num_kv_heads`` no divisor, a bad window or softcap.
        AssertionError: ``embed_dim`` not divisible by ``num_heads`` (as torch).

    Example::

        >>> attn = attention_ext.MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = attn(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))

    Source: Vaswani et al., *Attention Is All You Need*, 2017.
    """

    num_kv_heads: int
    window: Window | None
    softcap: float
    alibi: bool
    sinks: nn.Parameter | None
    alibi_slopes: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        window: Window | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi: bool = False,
    ) -> None:
        # torch's constructor checks the sizes and draws the parameters, in the order that makes
        # equal seeds give equal parameters.
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        if alibi and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "alibi cannot be combined with add_bias_kv or add_zero_attn: "
                "the keys they append have no position"
            )
        if not (math.isfinite(softcap) and softcap >= 0.0):
            raise ValueError(f"softcap must be finite and not negative, got {softcap}")
        self.num_kv_heads = checked_kv_heads(num_heads, num_kv_heads)
        self.window = checked_window(window)
        self.softcap = float(softcap)
        self.alibi = bool(alibi)
        if self.num_kv_heads != num_heads:
            self._shrink_key_value_projections()
        self.register_parameter("sinks", None)
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        self.register_buffer("alibi_slopes", None, persistent=False)
        self._set_alibi_slopes()
        self._forward_hooks[_HOOK_KEY] = _always_call_forward

    def _shrink_key_value_projections(self) -> None:
        """Give the key and value projections num_kv_heads heads, under torch's names."""

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(self.out_proj.weight.new_empty(shape))

        kv_dim = self.num_kv_heads * self.head_dim
        if self._qkv_same_embed_dim:
            self.in_proj_weight = parameter(self.embed_dim + 2 * kv_dim, self.embed_dim)
        else:
            self.k_proj_weight = parameter(kv_dim, self.kdim)
            self.v_proj_weight = parameter(kv_dim, self.vdim)
        if self.in_proj_bias is not None:
            self.in_proj_bias = parameter(self.embed_dim + 2 * kv_dim)
        if self.bias_k is not None:
            self.bias_k = parameter(1, 1, kv_dim)
            self.bias_v = parameter(1, 1, kv_dim)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        sinks = self._parameters.get("sinks")  # torch's constructor calls this before it exists
        if sinks is not None:
            nn.init.zeros_(sinks)

    def _set_alibi_slopes(self) -> None:
        """Build the slopes beside the parameters; 16-bit parameters keep float32 slopes."""
        if not self.alibi:
            return
        weight = self.out_proj.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        slopes = _alibi_slopes(self.num_heads)
        self.alibi_slopes = torch.tensor(slopes, dtype=dtype, device=weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> MultiheadAttention:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._set_alibi_slopes()  # a cast may have rounded them, to_empty leaves them unset
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Older pickles, and torch's own state in replace.py, lack the attributes added here.
        state.setdefault("batch_first", False)
        state.setdefault("num_kv_heads", state.get("num_heads"))
        state.setdefault("window", None)
        state.setdefault("softcap", 0.0)
        state.setdefault("alibi", False)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._parameters.setdefault("sinks", None)
        if "alibi_slopes" not in self._buffers:
            self.register_buffer("alibi_slopes", None, persistent=False)
            self._set_alibi_slopes()
        self._forward_hooks[_HOOK_KEY] = _always_call_forward

    def __prepare_scriptable__(self) -> MultiheadAttention:
        raise NotImplementedError(
            "attention_ext.MultiheadAttention does not support torch.jit.script, which torch has "
            "deprecated: use torch.compile or torch.export"
        )

    def extra_repr(self) -> str:
        extras = {
            "num_kv_heads": self.num_kv_heads if self.num_kv_heads != self.num_heads else None,
            "window": self.window,
            "softcap": self.softcap or None,
            "sinks": True if self.sinks is not None else None,
            "alibi": self.alibi or None,
        }
        return ", ".join(f"{k}={v}" for k, v in extras.items() if v is not None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from ``query`` to ``key`` and ``value``.

        Args:
            query: (L, E) unbatched, (L, N, E), or (N, L, E) with ``batch_first``.
            key: (S, kdim), (S, N, kdim) or (N, S, kdim).
            value: (S, vdim), (S, N, vdim) or (N, S, vdim).
            key_padding_mask: (N, S), or (S) unbatched. Bool: True = **hidden**. Float: added to the
                scores, -inf hides. It is never expanded, except that a float one that requires
                grad becomes part of the bias.
            need_weights: also return the weights. Does not change ``attn_output``.
            attn_mask: (L, S), or (N * num_heads, L, S) with index ``n * num_heads + h``. Bool:
                True = **hidden**. Float: added to the scores, -inf hides; differentiable.
            average_attn_weights: return the mean over the heads instead of one matrix per head.
            is_causal: query ``i`` sees keys ``0..i``. Ignored beside ``attn_mask``.

        All three may be nested tensors (N, ragged length, E), strided or jagged, with
        ``batch_first`` and without masks; ``attn_output`` is then nested like ``query``.

        Returns:
            ``attn_output``, shaped like ``query``, and None or the weights that multiplied the
            values (after dropout): (N, L, S), or (N, num_heads, L, S) if not averaged; without N if
            unbatched; S counts the appended keys; in the dtype of the projected query.

        Raises:
            AssertionError, RuntimeError: as torch's module for shapes and dtypes that do not fit.
            ValueError: dropout outside [0, 1] in training.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            if key_padding_mask is not None or attn_mask is not None:
                raise AssertionError(
                    "MultiheadAttention does not support key_padding_mask or attn_mask with "
                    "NestedTensor input: the lengths say what is padding"
                )
            return self._forward_nested(
                query, key, value, need_weights, average_attn_weights, is_causal
            )
        check_mask_dtype(key_padding_mask, "key_padding_mask")
        check_mask_dtype(attn_mask, "attn_mask")
        batched: bool = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        if not batched:
            # One sequence is a batch of one. Equal inputs stay the same object: one projection.
            q, k = query.unsqueeze(self._batch_dim), key.unsqueeze(self._batch_dim)
            k = q if key is query else k
            v = k if value is key else value.unsqueeze(self._batch_dim)
            query, key, value = q, k, v
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        sizes = check_shapes(self, query, key, value, key_padding_mask, attn_mask)
        q, k, v = self._project(query, key, value)
        masks = translate_masks(
            attn_mask, key_padding_mask, is_causal, self.window or NO_WINDOW, sizes, q
        )
        k, v = self._append_keys(k, v)
        heads, weights = self._attend(
            q, k, v, masks, average_attn_weights if need_weights else None
        )
        del q, k, v  # slices of the projection: the output projection may take their memory
        merged = heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)
        output: Tensor = self.out_proj(merged.flatten(2))
        if not batched:
            output = output.squeeze(self._batch_dim)
            weights = weights.squeeze(0) if weights is not None else None
        return output, weights

    @property
    def _batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project the inputs; return views (N, heads, length, head_dim) of the results."""
        bias = self.in_proj_bias
        q_dim, kv_dim = self.embed_dim, self.num_kv_heads * self.head_dim
        if not self._qkv_same_embed_dim:
            w_q: Tensor = self.q_proj_weight
            w_k: Tensor = self.k_proj_weight
            w_v: Tensor = self.v_proj_weight
        elif key is not value:
            w_q, w_k, w_v = self.in_proj_weight.split_with_sizes((q_dim, kv_dim, kv_dim))
        elif query is not key:  # one projection for key and value
            w_q, w_kv = self.in_proj_weight.split_with_sizes((q_dim, 2 * kv_dim))
            b_q = b_kv = None
            if bias is not None:
                b_q, b_kv = bias.split_with_sizes((q_dim, 2 * kv_dim))
            q = self._heads(F.linear(query, w_q, b_q))
            packed = self._heads(F.linear(key, w_kv, b_kv))
            k, v = packed.split_with_sizes((self.num_kv_heads, self.num_kv_heads), dim=2)
            return self._heads_first(q), self._heads_first(k), self._heads_first(v)
        else:  # one projection for all three
            packed = self._heads(F.linear(query, self.in_proj_weight, bias))
            heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
            q, k, v = packed.split_with_sizes(heads, dim=2)
            return self._heads_first(q), self._heads_first(k), self._heads_first(v)
        b_q = b_k = b_v = None
        if bias is not None:
            b_q, b_k, b_v = bias.split_with_sizes((q_dim, kv_dim, kv_dim))
        q = self._heads(F.linear(query, w_q, b_q))
        k = self._heads(F.linear(key, w_k, b_k))
        v = self._heads(F.linear(value, w_v, b_v))
        return self._heads_first(q), self._heads_first(k), self._heads_first(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), x.size(2) // self.head_dim, self.head_dim)

    def _heads_first(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned key and value, then the zero ones, to every sequence."""
        bias_k, bias_v = self.bias_k, self.bias_v
        if (bias_k is None) != (bias_v is None):
            present, absent = ("bias_v", "bias_k") if bias_k is None else ("bias_k", "bias_v")
            raise AssertionError(f"{present} is set but {absent} is None")
        ks, vs = [k], [v]
        if bias_k is not None and bias_v is not None:
            one_key = (1, self.num_kv_heads, 1, self.head_dim)
            ks.append(bias_k.to(k.dtype).view(one_key).expand(k.size(0), -1, -1, -1))
            vs.append(bias_v.to(v.dtype).view(one_key).expand(v.size(0), -1, -1, -1))
        if self.add_zero_attn:
            ks.append(k.new_zeros(k.size(0), self.num_kv_heads, 1, self.head_dim))
            vs.append(ks[-1])
        if len(ks) == 1:
            return k, v
        return torch.cat(ks, dim=2), torch.cat(vs, dim=2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, average: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the operator, and rebuild the weights from its row statistics if asked for."""
        dropout_p = self.dropout if self.training else 0.0
        if not 0.0 <= dropout_p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
        tensors = (
            masks.attn_mask,
            masks.attn_bias,
            masks.key_mask,
            self.sinks,
            self.alibi_slopes,
            None,  # query_offsets
            None,  # cu_seqlens_q
            None,  # cu_seqlens_k
            make_rng_state(q.device) if dropout_p > 0.0 else None,
        )
        scalars: dict[str, Any] = {
            "window_left": masks.window[0],
            "window_right": masks.window[1],
            "is_causal": masks.is_causal,
            "softcap": self.softcap,
            "dropout_p": dropout_p,
        }
        heads, lse, residual, _ = _ops.attention(q, k, v, *tensors, **scalars)
        if average is None:
            return heads, None
        weights = _ops.attention_weights(
            q, k, *tensors, lse, residual, average_heads=average, **scalars
        )
        return heads, weights

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Pad, hide the padding, nest the output again; weights come back padded with zeros."""
        if not (query.is_nested and key.is_nested and value.is_nested):
            raise AssertionError(
                "MultiheadAttention expects query, key and value to be all nested or none of them"
            )
        if not self.batch_first:
            raise AssertionError("MultiheadAttention needs batch_first=True for NestedTensor input")
        q = query.to_padded_tensor(0.0)
        k = q if key is query else key.to_padded_tensor(0.0)
        v = k if value is key else value.to_padded_tensor(0.0)
        hidden = beyond(nested_lengths(key), k.size(1))
        lengths = nested_lengths(query)
        output, weights = self.forward(
            q, k, v, hidden, need_weights, None, average_attn_weights, is_causal
        )
        if weights is not None:
            rows = beyond(lengths, q.size(1)).unsqueeze(-1)
            weights = weights.masked_fill(rows if average_attn_weights else rows.unsqueeze(1), 0.0)
        return nest_like(output, query, lengths), weights


def _alibi_slopes(num_heads: int) -> list[float]:
    """Return 2^(-8h/n), h = 1..n, for a power of two n; further heads take those between.

    Source: Press et al., *Train Short, Test Long*, 2022.
    """
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]
    return slopes + [2.0 ** (-4.0 * h / n) for h in range(1, 2 * (num_heads - n), 2)]
