"""Make a model of transformers out of LM, in any order and with Spans in it. In an exported folder,
the files of nanodepth's book precede this text, so their names are known here.
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
        "lm: the settings of a ModelConfig. order: in the form in which a checkpoint stores it."
        self.lm, self.order = lm or {}, list(order)
        shape = ModelConfig(**self.lm)
        for name, value in dict(
                vocab_size=shape.vocab_size, hidden_size=shape.n_embd,
                num_attention_heads=shape.n_head, num_key_value_heads=shape.n_kv_head,
                max_position_embeddings=shape.context,
                tie_word_embeddings=shape.tie_embeddings).items():
            settings.setdefault(name, value)
        super().__init__(**settings)

    @property
    def num_hidden_layers(self):        # the number of slots that a cache needs
        return len(unrolled(order_of(self.order))) or 1


def order_of(items):
    "Return the order that a checkpoint stores in this form."
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
    "Inside this `with`, no token sees padding. `keep` (B, S) is False at padding."

    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            q, k, v, _ = args
            T, S = q.shape[2], k.shape[2]
            sees = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            itself = torch.eye(T, S, dtype=torch.bool, device=q.device).roll(S - T, 1)
            mask = sees & self.keep[:, None, None, :S] | itself     # padding sees itself
            args, kwargs = (q, k, v), kwargs | dict(attn_mask=mask, is_causal=False)
        return function(*args, **(kwargs or {}))


def states_after_padding(pads, without_padding):
    """Return the first_state of a Core for rows in which `pads` tokens of padding precede the text.
    `without_padding` is the Core's own first_state."""
    def first_state(run, e):
        end = run.start + e.shape[1]
        of_text = without_padding(SimpleNamespace(start=0), e.new_zeros(1, end, e.shape[2]))[0]
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
        unknown = [name for name, value in more.items()
                   if value is not None and value is not False]
        require(not unknown and return_dict is not False,
                f'{unknown or "return_dict=False"} is not supported by this model')
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
                    'with gradient checkpointing, padding must follow a text, and not precede it')
        if core := core_of(model):
            core.r = num_steps or self.r
            vars(core).pop('first_state', None)
            if pads is not None:
                core.first_state = states_after_padding(pads, core.first_state)
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
        "Return a cache of model.py with what a cache of transformers holds, a slot for each depth."
        layers = unrolled(self.model.order)
        full = [depth for depth, slot in enumerate(theirs.layers) if slot.get_seq_length()]
        require(not full or full[-1] < len(layers), 'this cache was filled with more num_steps')
        return {(depth, layers[depth]): (theirs.layers[depth].keys, theirs.layers[depth].values)
                for depth in full}

    @staticmethod
    def give(cache, theirs):
        "Copy what a cache of model.py holds into a cache of transformers."
        cache.pop('order')
        while len(theirs.layers) <= max(depth for depth, _ in cache):
            theirs.layers.append(DynamicLayer())
        for (depth, _), (k, v) in cache.items():
            slot = theirs.layers[depth]
            if not slot.is_initialized:
                slot.lazy_initialization(k, v)
            slot.keys, slot.values = k, v
