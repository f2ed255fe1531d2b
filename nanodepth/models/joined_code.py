"""For transformers. Above this stand files of nanodepth (the book), one after the other. With their
names it makes of their LM, in any order and with Spans in it, a model that transformers opens:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**text, num_steps=8)             # a Core runs eight times
"""
from contextlib import nullcontext
from types import SimpleNamespace

from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast


class DepthConfig(PretrainedConfig):
    model_type = 'nanodepth'
    keys_to_ignore_at_inference = ['past_key_values']       # when Trainer evaluates

    def __init__(self, lm=None, order=(), **settings):
        "lm: a ModelConfig's settings. order: as a checkpoint has it."
        self.lm, self.order = lm or {}, list(order)
        own = ModelConfig(**self.lm)
        for name, value in dict(vocab_size=own.vocab_size, hidden_size=own.n_embd,
                                num_attention_heads=own.n_head, max_position_embeddings=own.context,
                                num_key_value_heads=own.n_kv_head,
                                tie_word_embeddings=own.tie_embeddings).items():
            settings.setdefault(name, value)
        super().__init__(**settings)

    @property
    def num_hidden_layers(self):        # as many slots as a cache needs
        return len(unrolled(order_of(self.order))) or 1


def order_of(items):
    "The order that a checkpoint keeps."
    order = []
    for item in items:
        if not isinstance(item, int):
            kind = globals().get(item['step'])
            require(isinstance(kind, type) and issubclass(kind, Span), f'{item["step"]}: no Span')
            item = kind(order_of(item['items']), **item['settings'])
        order.append(item)
    return order


class Block(GradientCheckpointingLayer, Block):
    pass


class Padded(TorchFunctionMode):
    "In here no token sees padding: `keep` is (B, S), False where that is."

    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            q, k, v, _ = args
            T, S = q.shape[2], k.shape[2]
            sees = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            own = torch.eye(T, S, dtype=torch.bool, device=q.device).roll(S - T, 1)
            mask = sees & self.keep[:, None, None, :S] | own        # padding sees itself
            args, kwargs = (q, k, v), kwargs | dict(attn_mask=mask, is_causal=False)
        return function(*args, **(kwargs or {}))


def states_behind(pads, own):
    "A Core's first_state where `pads` tokens of padding stand before each row's text."
    def first_state(run, e):
        end = run.start + e.shape[1]
        of_text = own(SimpleNamespace(start=0), e.new_zeros(1, end, e.shape[2]))[0]     # (end, C)
        places = torch.arange(run.start, end, device=e.device) - pads[:, None]
        return of_text[places.clamp(min=0)]
    return first_state


class DepthForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DepthConfig
    _supports_sdpa = supports_gradient_checkpointing = True
    _no_split_modules = ['Block']
    _input_embed_layer = 'embed'
    _tied_weights_keys = {'model.head.weight': 'model.embed.weight'}

    def __init__(self, config):
        super().__init__(config)
        self.model = LM(ModelConfig(**config.lm | dict(vocab_size=config.vocab_size)))
        self.model.order = order_of(config.order)
        del self.model.cos, self.model.sin      # transformers would cast them, or leave them empty
        self.model.cos = self.model.sin = torch.empty(0)
        core = core_of(self.model)
        self.r = core and core.r
        self.post_init()

    def get_output_embeddings(self):
        return self.model.head

    def set_output_embeddings(self, head):
        self.model.head = head

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, labels=None,
                use_cache=None, num_steps=None, logits_to_keep=0, position_ids=None, cache=None,
                num_items_in_batch=None, return_dict=True, **more):
        model = self.model
        asked = [name for name, value in more.items() if value is not None and value is not False]
        require(not asked and return_dict is not False,
                f'{asked or "return_dict=False"} is not known here')
        past_key_values = cache if past_key_values is None else past_key_values  # (a new name)
        if model.cos.numel() == 0 or model.cos.device != input_ids.device:
            model.cos, model.sin = (t.to(input_ids.device) for t in rope_tables(model.config))
        if use_cache is None:
            use_cache = getattr(self.config, 'use_cache', True) and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        pads, keep = None, None
        if attention_mask is not None and attention_mask.dim() == 2 and not attention_mask.all():
            keep = attention_mask.bool()
            pads = keep.int().argmax(-1)
            require(not (model.layers[0].gradient_checkpointing and self.training and pads.any()),
                    'with gradient checkpointing, padding stands behind a text, not before it')
        if core := core_of(model):
            core.r = num_steps or self.r
            vars(core).pop('first_state', None)
            if pads is not None:
                core.first_state = states_behind(pads, core.first_state)
        cache = None if past_key_values is None else self.ours(past_key_values)
        with Padded(keep) if keep is not None else nullcontext():
            x = model.norm(model.hidden(input_ids, cache=cache))
        if cache is not None:
            self.give(cache, past_key_values)
        logits = model.head(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None if labels is None else self.loss_function(
            logits, labels, self.config.vocab_size, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def ours(self, theirs):
        "A cache of transformers, which has a slot for each depth, as one of ours."
        layers = unrolled(self.model.order)
        full = [depth for depth, slot in enumerate(theirs.layers) if slot.get_seq_length()]
        require(not full or full[-1] < len(layers), 'this cache was filled with more num_steps')
        return {(depth, layers[depth]): (theirs.layers[depth].keys, theirs.layers[depth].values)
                for depth in full}

    @staticmethod
    def give(cache, theirs):
        "What a forward has added to our cache, into one of transformers."
        cache.pop('order')
        while len(theirs.layers) <= max(depth for depth, _ in cache):
            theirs.layers.append(DynamicLayer())
        for (depth, _), (k, v) in cache.items():
            slot = theirs.layers[depth]
            if not slot.is_initialized:
                slot.lazy_initialization(k, v)
            slot.keys, slot.values = k, v
