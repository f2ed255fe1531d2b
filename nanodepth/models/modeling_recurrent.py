"""A recurrent model for transformers, in the format of the authors of "Retrofitted Recurrence".
`nanodepth export` puts this file beside the weights, so that transformers opens the folder with
nothing else installed. In model.generate(**text, num_steps=8), the core runs eight times.
Usage: model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""
import math  # noqa: F401 (rope_tables)
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nanodepth.model import rope_tables, rotate


class RecurrentConfig(PretrainedConfig):
    model_type = 'huginn_raven'
    keys_to_ignore_at_inference = ['past_key_values']       # when Trainer evaluates

    def __init__(self, max_position_embeddings=2048, **settings):
        self.max_position_embeddings = max_position_embeddings
        settings.setdefault('tie_word_embeddings', False)
        super().__init__(**settings)

    @property
    def num_hidden_layers(self):        # as many slots as a cache of transformers needs
        return self.depth(getattr(self, 'mean_recurrence', 1))

    def depth(self, steps):
        return sum(getattr(self, f'n_layers_in_{part}', 0) * times for part, times in (
            ('prelude', 1), ('recurrent_block', steps), ('coda', 1)))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.sizes = [c.n_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
        self.head_dim = c.head_dim
        self.grouped = c.n_heads != c.num_key_value_heads
        # qkv_bias and qk_norm are settings of ours: the authors' code has none
        self.Wqkv = nn.Linear(c.n_embd, sum(self.sizes), bias=getattr(c, 'qkv_bias', False))
        self.proj = nn.Linear(self.sizes[0], c.n_embd, bias=False)
        if getattr(c, 'qk_norm', False):
            self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, c.norm_eps) for _ in range(2))

    def forward(self, x, rope, mask, cache, depth):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in self.Wqkv(x).split(self.sizes, dim=-1))
        if hasattr(self, 'q_norm'):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, rope), rotate(k, rope), v))
        if cache is not None:
            k, v = cache.update(k, v, depth)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.grouped)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = nn.Linear(c.n_embd, 2 * c.intermediate_size, bias=False)      # gate and up
        self.proj = nn.Linear(c.intermediate_size, c.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2 = (nn.RMSNorm(c.n_embd, c.norm_eps) for _ in range(2))
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x, *how):
        x = x + self.attn(self.norm_1(x), *how)
        return x + self.mlp(self.norm_2(x))


class RavenForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RecurrentConfig
    _supports_sdpa = True
    _no_split_modules = ['Layer']

    def __init__(self, config):
        super().__init__(config)
        c = config
        layers = lambda n: nn.ModuleList(Layer(c) for _ in range(n))
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), prelude=layers(c.n_layers_in_prelude),
            adapter=nn.Linear(2 * c.n_embd, c.n_embd, bias=False),
            core_block=layers(c.n_layers_in_recurrent_block), coda=layers(c.n_layers_in_coda),
            ln_f=nn.RMSNorm(c.n_embd, c.norm_eps)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.rope = None
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer.wte

    def set_input_embeddings(self, embedding):
        self.transformer.wte = embedding

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head
        self.config.padded_vocab_size = len(head.weight)        # the authors' name for it

    # ---------------------------------------------------------------------------- the first state

    def noise(self, shape, generator=None):
        if self.config.init_values.get('cut', True):
            return nn.init.trunc_normal_(torch.empty(shape), a=-3, b=3, generator=generator)
        return torch.randn(shape, generator=generator)

    def first_state(self, e, positions):
        kind = getattr(self.config, 'first_state', 'fresh')     # a setting of ours, too
        std = self.config.init_values['std']
        if std == 0:
            return torch.zeros_like(e)
        if kind == 'fresh':
            return self.noise(e.shape).to(e) * std
        # the same for every text: 64 places at a time, each block by its own seed
        rows = [self.noise((64, e.shape[-1]), torch.Generator().manual_seed(i))
                for i in range(int(positions.max()) // 64 + 1)]
        return (torch.cat(rows).to(e)[positions] * std).expand_as(e)

    # --------------------------------------------------------------------------------- one forward

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                labels=None, use_cache=None, num_steps=None, logits_to_keep=0, cache=None, **more):
        c, t = self.config, self.transformer
        more = {name: value for name, value in more.items() if value is not None}
        for name in ('output_hidden_states', 'output_attentions'):
            more.setdefault(name, getattr(c, name))
        asked = {name for name, value in more.items() if value is not False}
        asked -= {'cache_position', 'return_dict', 'num_items_in_batch'}
        if asked or more.get('return_dict') is False:       # what has no effect is not swallowed
            raise TypeError(f'{", ".join(asked) or "return_dict=False"}: this model knows no such '
                            'argument')
        if cache is not None:               # its name from transformers 5.24 on
            past_key_values = cache
        steps = c.mean_recurrence if num_steps is None else num_steps
        assert steps >= 1, f'num_steps={num_steps}: the core runs at least once'
        if use_cache is None:
            use_cache = getattr(c, 'use_cache', True) and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        T = input_ids.shape[1]
        past = 0
        if past_key_values is not None:
            self.provide(past_key_values, c.depth(steps))
            past = past_key_values.get_seq_length()
            filled = {slot.get_seq_length() for slot in past_key_values.layers[:c.depth(steps)]}
            assert filled <= {past}, 'this cache was filled with fewer num_steps'
        if position_ids is None:
            position_ids = torch.arange(past, past + T, device=input_ids.device)[None]
            if attention_mask is not None:
                position_ids = (attention_mask.bool().cumsum(-1) - 1).clamp(min=0)[:, past:past + T]
        if self.rope is None:       # by a name of ours: transformers rewrites rope_scaling
            self.rope = rope_tables(SimpleNamespace(**c.rotary))
        rope = [table.to(input_ids.device)[position_ids][:, :, None] for table in self.rope]
        mask = torch.ones(T, past + T, dtype=torch.bool, device=input_ids.device).tril(past)
        if attention_mask is not None:      # a padded token sees itself, so that it is a number
            own = torch.eye(T, past + T, dtype=torch.bool, device=mask.device).roll(past, 1)
            mask = (mask & attention_mask.bool()[:, None, None, :past + T]) | own

        def run(x, layers, depth):
            for d, layer in enumerate(layers, depth):
                x = layer(x, rope, mask, past_key_values, d)
            return x
        e = run(t.wte(input_ids), t.prelude, 0)
        s = self.first_state(e, position_ids)
        depth = len(t.prelude) + len(t.coda)        # last, as its number may change with a cache
        for _ in range(steps):
            x = t.adapter(torch.cat((s, e), dim=-1))
            s = run(x.to(e.dtype), t.core_block, depth)     # autocast made it bfloat16
            depth += len(t.core_block)
        x = t.ln_f(run(s, t.coda, len(t.prelude)))
        logits = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None if labels is None else self.loss_function(
            logits, labels, c.vocab_size, more.get('num_items_in_batch'))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def provide(self, cache, depth):
        "A cache has a slot for each position of the unrolled depth, however often the core runs."
        kind = type(cache.layers[0]) if cache.layers else None
        while kind is not None and len(cache.layers) < depth:
            cache.layers.append(kind())
