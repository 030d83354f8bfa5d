"""The decoder once more, written for clarity alone: whole sequences, float64, no cache."""

import torch


def full_logits(config, tensors, tokens):
    """Return the logits of every token of one sequence, (n, vocab_size), in float64.

    `tensors` gives weights by their Hugging Face names. Rotary scaling is left out.
    """
    shape = config.shape
    n, d = len(tokens), shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    frequency = config.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turn = torch.polar(
        torch.ones(n, d // 2, dtype=torch.float64),
        torch.arange(n, dtype=torch.float64)[:, None] * frequency,
    )

    def weight(name):
        return tensors[f"{name}.weight"].double()

    def norm(x, name):
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / (mean_square + config.rms_norm_eps).sqrt() * weight(name)

    def rotate(x):  # (n, d): dimension i turns with i + d/2, a complex number
        turned = torch.complex(x[:, : d // 2], x[:, d // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    def heads(x, name):
        return list((x @ weight(name).T).split(d, dim=1))

    x = weight("model.embed_tokens")[tokens]
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        queries, keys, values = (
            heads(h, f"{layer}.self_attn.{name}_proj") for name in ("q", "k", "v")
        )
        if shape.qk_norm:
            queries = [norm(q, f"{layer}.self_attn.q_norm") for q in queries]
            keys = [norm(k, f"{layer}.self_attn.k_norm") for k in keys]
        attended = []
        for head, query in enumerate(queries):
            key, value = keys[head // group], values[head // group]
            scores = rotate(query) @ rotate(key).T / d**0.5
            attended.append(scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value)
        x = x + torch.cat(attended, dim=1) @ weight(f"{layer}.self_attn.o_proj").T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = h @ weight(f"{layer}.mlp.gate_proj").T
        up = h @ weight(f"{layer}.mlp.up_proj").T
        x = x + (gate * gate.sigmoid() * up) @ weight(f"{layer}.mlp.down_proj").T
    head = "model.embed_tokens" if shape.tied_embeddings else "lm_head"
    return norm(x, "model.norm") @ weight(head).T
