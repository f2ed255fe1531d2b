"""Make tiny random checkpoints of transformers' decoder families: 6 layers of width 32.

Their weights are large, so that a loop changes the result. With nearly linear layers a test would
see no difference."""
import torch

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,     # of rotary frequencies
              original_max_position_embeddings=100)
SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
             num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=None, tie_word_embeddings=False)
HYBRID = dict(sliding_window=5, layer_types=['sliding_attention', 'full_attention'] * 3)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
MLA = dict(q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
           n_shared_experts=1, first_k_dense_replace=2,
           num_key_value_heads=4, n_group=1, topk_group=1, routed_scaling_factor=1.5)
FAMILIES = dict(
    llama={}, mistral=dict(sliding_window=5), qwen2={},
    qwen2_hybrid=dict(use_sliding_window=True, **HYBRID), qwen3={}, gemma2=HYBRID,
    gemma3_text=HYBRID,
    phi3={}, gpt2={}, gpt_neox={}, olmo2={}, smollm3=dict(no_rope_layer_interval=2), granite={},
    cohere={}, starcoder2={}, glm4={}, falcon={}, bloom={},
    gptj={}, codegen={}, mpt={},
    llama4_text=dict(interleave_moe_layer_step=2, num_local_experts=4, attention_chunk_size=5,
                     num_experts_per_tok=1, intermediate_size_mlp=48),
    mixtral=dict(num_local_experts=4, num_experts_per_tok=2),
    qwen2_moe=dict(num_experts=4, shared_expert_intermediate_size=16, **EXPERTS),
    qwen3_moe=dict(num_experts=4, norm_topk_prob=True, **EXPERTS),
    deepseek_v2=dict(n_routed_experts=4, topk_method='greedy', **EXPERTS, **MLA),
    deepseek_v3=dict(n_routed_experts=4, norm_topk_prob=True, **EXPERTS, **MLA),
    gpt_oss=dict(num_local_experts=4, num_experts_per_tok=2, **HYBRID))
GPT = dict(n_embd=32, n_layer=6, n_head=4, n_positions=64)
OLDER = dict(       # families with names of their own for their sizes; their layers return tuples
    gpt2=GPT, gptj=dict(rotary_dim=4, **GPT), codegen=dict(rotary_dim=4, **GPT),
    falcon=dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=4),
    bloom=dict(hidden_size=32, n_layer=6, n_head=4), mpt=dict(d_model=32, n_layers=6, n_heads=4,
                                                              max_seq_len=64))
ALIBI = 'bloom', 'mpt'          # their bias is made for the keys of the model as it is
# transformers refuses sdpa for them
EAGER_ONLY = 'gemma2', 'gpt_oss', 'bloom', 'gptj', 'codegen', 'mpt', 'recurrent_gemma'
MIXTURES = 'mixtral', 'qwen2_moe', 'qwen3_moe', 'deepseek_v2', 'deepseek_v3', 'gpt_oss'


def tiny(name, attention='sdpa', seed=0, std=0.2, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM
    kind = name.removesuffix('_hybrid')
    shape = SHAPE
    if kind in OLDER:
        shape = dict(vocab_size=97, bos_token_id=1, eos_token_id=None, pad_token_id=0) | OLDER[kind]
    config = AutoConfig.for_model(kind, **{**shape, **FAMILIES.get(name, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config,
                                             attn_implementation='eager' if name in EAGER_ONLY
                                             else attention).float().eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=std)
    return model
