"""record.py - reference figures from unmodified transformers, for tools/oracle_compare.c (which documents the file format).

    python3 record.py MODEL_F32.gguf CONFIG_DIR PROMPTS.json OUT.bin      figures of exactly the weights in a float32 GGUF file
    python3 record.py --npz ORACLE.npz OUT.bin                            figures recorded earlier as NAME.ids, NAME.argmax, ...

Needs torch and transformers (5.16 or later); run once, by hand: nothing that is built or tested needs Python. CONFIG_DIR holds the
checkpoint's config.json and tokenizer.json. The mapping of names is the inverse of `strata convert` (src/convert/), written anew.
"""
import json
import struct
import sys

import numpy as np


def write(path, n_vocab, prompts):
    with open(path, "wb") as f:
        f.write(b"STRORCL1" + struct.pack("<II", n_vocab, len(prompts)))
        for p in prompts:
            f.write(p["name"].encode().ljust(32, b"\0") + struct.pack("<II", len(p["ids"]), len(p["greedy"])))
            for key, kind in (("ids", "<i4"), ("greedy", "<i4"), ("argmax", "<i4"), ("margin", "<f4"), ("last_logits", "<f4")):
                f.write(np.asarray(p[key]).astype(kind).tobytes())


def from_npz(path, out):
    z = np.load(path)
    names = [k[:-4] for k in z.files if k.endswith(".ids")]
    prompts = [dict(name=n, **{k: z[f"{n}.{k}"] for k in ("ids", "greedy", "argmax", "margin", "last_logits")}) for n in names]
    for p in prompts:
        need = len(p["ids"]) + len(p["greedy"])
        m = np.asarray(p["margin"], dtype=np.float32)
        p["margin"] = np.pad(m, (0, need - len(m)), constant_values=1e9)[:need]
    write(out, len(prompts[0]["last_logits"]), prompts)


def read_gguf(path):
    """Tensors of a float32 GGUF file, and its metadata."""
    d = open(path, "rb").read()
    at = 8

    def take(fmt):
        nonlocal at
        v = struct.unpack_from("<" + fmt, d, at)
        at += struct.calcsize("<" + fmt)
        return v[0]

    def string():
        nonlocal at
        n = take("Q")
        at += n
        return d[at - n:at].decode(errors="replace")

    kinds = "BbHhIif?"

    def value(t):
        if t == 8: return string()
        if t == 9:
            e, n = take("I"), take("Q")
            return [value(e) for _ in range(n)]
        return take({10: "Q", 11: "q", 12: "d"}.get(t) or kinds[t])

    n_tensors, n_keys = take("Q"), take("Q")
    meta = {}
    for _ in range(n_keys):
        k = string()
        meta[k] = value(take("I"))
    infos = []
    for _ in range(n_tensors):
        name = string()
        dims = [take("Q") for _ in range(take("I"))]
        assert take("I") == 0, f"{name} is not F32"
        infos.append((name, dims, take("Q")))
    align = meta.get("general.alignment", 32)
    base = (at + align - 1) // align * align
    return {n: np.frombuffer(d, "<f4", int(np.prod(s)), base + o).reshape(s[::-1]) for n, s, o in infos}, meta


def state_dict(T, c):
    """GGUF tensors -> the checkpoint's names: undo the permutation of value heads, the +1 of norms, -exp of A."""
    nk, nv, dk, dv = (c[k] for k in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"))
    r, H, K, L = nv // nk, c["hidden_size"], nk * dk, c["num_hidden_layers"]
    inv = np.array([(h % r) * nk + h // r for h in range(nv)])  # where checkpoint head h sits in the file
    rows = lambda a, d: a.reshape(nv, d, *a.shape[1:])[inv].reshape(a.shape)
    S = {"model.embed_tokens.weight": T["token_embd.weight"], "lm_head.weight": T["output.weight"]}

    def mix(src, dst):
        S[dst + "hc_norm.weight"] = T[src + "_norm.weight"] - 1
        S[dst + "input_mix_weight_down.weight"] = T[src + "_down.weight"]
        S[dst + "input_mix_weight_up.weight"] = T[src + "_up.weight"]
        if src + "_inject.weight" in T: S[dst + "block_inject_weight.weight"] = T[src + "_inject.weight"]

    mix("output_hc", "model.hyper_connection_mixer.")
    for i in range(L):
        s, d = f"blk.{i}.", f"model.layers.{i}."
        mix(s + "hc_attn", d + "attn_hyper_connection.")
        mix(s + "hc_ffn", d + "mlp_hyper_connection.")
        if s + "attn_q.weight" in T:
            a = d + "self_attn."
            for x, y in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")): S[a + y + ".weight"] = T[s + x + ".weight"]
            S[a + "q_norm.weight"], S[a + "k_norm.weight"] = T[s + "attn_q_norm.weight"] - 1, T[s + "attn_k_norm.weight"] - 1
            S[a + "indexer.index_qk_proj.weight"] = np.concatenate([T[s + "indexer.q_proj.weight"], T[s + "indexer.k_proj.weight"]])
            S[a + "indexer.q_layernorm.weight"], S[a + "indexer.k_layernorm.weight"] = T[s + "indexer.q_norm.weight"] - 1, T[s + "indexer.k_norm.weight"] - 1
        else:
            a = d + "linear_attn."
            q, cv = T[s + "attn_qkv.weight"], T[s + "ssm_conv1d.weight"]
            S[a + "in_proj_qkv.weight"] = np.concatenate([q[:2 * K], rows(q[2 * K:], dv)])
            S[a + "in_proj_z.weight"] = rows(T[s + "attn_gate.weight"], dv)
            S[a + "in_proj_b.weight"], S[a + "in_proj_a.weight"] = T[s + "ssm_beta.weight"][inv], T[s + "ssm_alpha.weight"][inv]
            S[a + "A_log"], S[a + "dt_bias"] = np.log(-T[s + "ssm_a"].reshape(-1)[inv]), T[s + "ssm_dt.bias"].reshape(-1)[inv]
            S[a + "conv1d.weight"] = np.concatenate([cv[:2 * K], rows(cv[2 * K:], dv)])[:, None]
            S[a + "norm.weight"] = T[s + "ssm_norm.weight"]
            S[a + "out_proj.weight"] = T[s + "ssm_out.weight"].reshape(H, nv, dv)[:, inv].reshape(H, nv * dv)
        m = d + "mlp."
        S[m + "gate.weight"], S[m + "shared_expert_gate.weight"] = T[s + "ffn_gate_inp.weight"], T[s + "ffn_gate_inp_shexp.weight"].reshape(1, -1)
        S[m + "experts.gate_up_proj"] = np.concatenate([T[s + "ffn_gate_exps.weight"], T[s + "ffn_up_exps.weight"]], 1)
        S[m + "experts.down_proj"] = T[s + "ffn_down_exps.weight"]
        for x in ("gate", "up", "down"): S[m + f"shared_expert.{x}_proj.weight"] = T[s + f"ffn_{x}_shexp.weight"]
        if s + "ple_key.weight" in T:
            p = d + "ple."
            S[p + "key_proj.weight"], S[p + "value_proj.weight"] = T[s + "ple_key.weight"], T[s + "ple_value.weight"]
            S[p + "conv1d.weight"] = T[s + "ple_conv1d.weight"][:, None]
            for x in ("key", "query", "conv"): S[p + f"norm_{x}.weight"] = T[s + f"ple_norm_{x}.weight"] - 1
            S["TABLE"] = T["per_layer_token_embd.weight"]
    return S


def load(path, config_dir):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    T, meta = read_gguf(path)
    c = json.load(open(config_dir + "/config.json"))
    config = AutoConfig.from_pretrained(config_dir)
    config.dtype = "float32"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    S = {k: torch.from_numpy(np.array(v, dtype=np.float32)) for k, v in state_dict(T, c).items()}
    table = S.pop("TABLE")
    own = model.state_dict()
    hashes = {"layer_multipliers": "layer_multipliers", "ngram_heads_offsets": "head_offsets", "ngram_heads_vocab_sizes": "head_vocab_sizes"}
    left = set(own)
    at = 0
    for k in sorted((k for k in own if "ngram_embedding" in k), key=lambda k: int(k.split("shard_")[1].split(".")[0]) if "shard_" in k else 0):
        n = own[k].shape[0]
        own[k].copy_(table[at:at + n])
        at += n
        left.discard(k)
    for k, v in own.items():
        short = k.rsplit(".", 1)[-1]
        if short in hashes:
            v.copy_(torch.tensor(meta["qwen4exp.ple." + hashes[short]], dtype=v.dtype))
            left.discard(k)
        elif k in S:
            assert v.numel() == S[k].numel(), (k, v.shape, S[k].shape)
            v.copy_(S[k].reshape(v.shape))
            left.discard(k)
            S.pop(k)
    print("transformers tensors without a source:", sorted(left))
    print("file tensors without a place:", sorted(S))
    assert not S and not [k for k in left if "inv_freq" not in k]
    return model


def record(path, config_dir, prompts_path, out):
    import torch
    from tokenizers import Tokenizer
    torch.backends.cuda.matmul.allow_tf32 = False
    model, tokenizer = load(path, config_dir), Tokenizer.from_file(config_dir + "/tokenizer.json")
    stops = {4065, 4063}
    prompts = []
    for name, text in json.load(open(prompts_path)).items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
            first = logits.clone()
            greedy = []
            while len(greedy) < 48 and not (greedy and greedy[-1] in stops):
                greedy.append(int(logits[-1].argmax()))
                logits = model(torch.tensor([ids + greedy]), use_cache=False).logits[0].float()
        top = logits.topk(2, -1).values
        prompts.append(dict(name=name, ids=ids, greedy=greedy, argmax=first.argmax(-1).numpy(), margin=(top[:, 0] - top[:, 1]).numpy(), last_logits=first[-1].numpy()))
        print(name, len(ids), "tokens,", len(greedy), "more, smallest margin of the continuation", float(min(prompts[-1]["margin"][len(ids) - 1:])))
    write(out, len(prompts[0]["last_logits"]), prompts)


if __name__ == "__main__":
    if sys.argv[1] == "--npz": from_npz(sys.argv[2], sys.argv[3])
    else: record(*sys.argv[1:5])
