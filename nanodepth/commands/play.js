// What the page asks, answered: model.py and wrapper.py in plain JavaScript, in a worker.
// `nanodepth play RUN` puts it into the page, beside the weights. A sequence is a Float32Array
// of T rows; there is no batch.

// ---- the model, as in model.py

function linear(W, x, T) {                                      // (T, I) -> (T, O)
  const I = x.length / T, O = W.length / I, fours = 4 * Math.ceil(T / 4);
  const from = new Float32Array(fours * I), y = new Float32Array(fours * O);
  from.set(x);
  for (let t = 0; t < T; t += 4) {                              // four tokens read a weight once
    const a = t * I, b = a + I, c = b + I, d = c + I;
    for (let o = 0; o < O; o++) {
      let p = 0, q = 0, r = 0, s = 0;
      for (let i = 0; i < I; i++) {
        const w = W[o * I + i];
        p += w * from[a + i]; q += w * from[b + i]; r += w * from[c + i]; s += w * from[d + i];
      }
      y[t * O + o] = p; y[(t + 1) * O + o] = q; y[(t + 2) * O + o] = r; y[(t + 3) * O + o] = s;
    }
  }
  return y.subarray(0, T * O);
}

const add = (x, y) => x.map((v, i) => v + y[i]);
const lerp = (x, y, share) => x.map((v, i) => v + share * (y[i] - v));

function rmsNorm(w, x, eps) {
  const C = w.length, y = new Float32Array(x.length);
  for (let t = 0; t < x.length; t += C) {
    let sum = 0;
    for (let i = 0; i < C; i++) sum += x[t + i] ** 2;
    const scale = 1 / Math.sqrt(sum / C + eps);
    for (let i = 0; i < C; i++) y[t + i] = x[t + i] * scale * w[i];
  }
  return y;
}

function softmax(x) {
  const most = x.reduce((a, b) => Math.max(a, b)), e = x.map(v => Math.exp(v - most));
  const sum = e.reduce((a, b) => a + b);
  return e.map(v => v / sum);
}

class LM {
  constructor(about, weights) {
    Object.assign(this, about.config, {order: about.order, weights});
  }
  weight(name) { return this.weights[`${name}.weight`]; }
  norm(name, x) { return rmsNorm(this.weight(name), x, this.norm_eps); }
  head(x) { return linear(this.weight('head'), this.norm('norm', x), x.length / this.n_embd); }

  rotate(x, heads, T, start) {          // turn each pair of channels by its position's angle
    const hd = this.head_dim, half = hd / 2;
    for (let t = 0; t < T; t++) for (let i = 0; i < half; i++) {
      const angle = (start + t) / this.rope_theta ** (2 * i / hd);
      const cos = Math.cos(angle), sin = Math.sin(angle);
      for (let h = 0; h < heads; h++) {
        const at = (t * heads + h) * hd + i, a = x[at], b = x[at + half];
        x[at] = a * cos - b * sin; x[at + half] = b * cos + a * sin;
      }
    }
    return x;
  }

  attention(name, x, T, slot, start, keep) {
    const {n_head: H, n_kv_head: G, head_dim: hd} = this, S = start + T;
    const q = this.rotate(linear(this.weight(`${name}.q`), x, T), H, T, start);
    const k = this.rotate(linear(this.weight(`${name}.k`), x, T), G, T, start);
    const v = linear(this.weight(`${name}.v`), x, T);
    const join = (old, fresh) => {      // the tokens before these, and these
      const all = new Float32Array(S * G * hd), before = start * G * hd;
      all.set(old.subarray(0, before)); all.set(fresh, before);
      return all;
    };
    const keys = join(slot.keys, k), values = join(slot.values, v), y = new Float32Array(T * H * hd);
    if (keep) Object.assign(slot, {keys, values});
    for (let t = 0; t < T; t++) for (let h = 0; h < H; h++) {
      const at = (t * H + h) * hd, g = Math.floor(h * G / H) * hd, seen = start + t + 1;
      const scores = new Float32Array(seen);
      for (let s = 0; s < seen; s++) {
        for (let i = 0; i < hd; i++) scores[s] += q[at + i] * keys[s * G * hd + g + i];
        scores[s] /= Math.sqrt(hd);
      }
      softmax(scores).forEach((p, s) => {
        for (let i = 0; i < hd; i++) y[at + i] += p * values[s * G * hd + g + i];
      });
    }
    return linear(this.weight(`${name}.o`), y, T);
  }

  mlp(name, x, T) {
    const gate = linear(this.weight(`${name}.gate`), x, T), up = linear(this.weight(`${name}.up`), x, T);
    return linear(this.weight(`${name}.down`), gate.map((v, i) => v / (1 + Math.exp(-v)) * up[i]), T);
  }

  // Run layers on the stream; the first stands at position `depth` of the order. Without `keep` the
  // cache is only read, as later evaluations of a looped window do.
  run(x, order, depth, cache, tap, keep = true) {
    const T = x.length / this.n_embd;
    order.forEach((i, k) => {
      const slot = cache.slots[depth + k] ??= {keys: NONE, values: NONE}, layer = `layers.${i}`;
      x = add(x, this.attention(`${layer}.attn`, this.norm(`${layer}.attn_norm`, x), T, slot,
                                cache.position, keep));
      x = add(x, this.mlp(`${layer}.mlp`, this.norm(`${layer}.mlp_norm`, x), T));
      tap?.(depth + k, x);
    });
    return x;
  }

  hidden(tokens, {order = this.order, wrap, cache = newCache(), tap} = {}) {
    const C = this.n_embd, table = this.weight('embed'), x = new Float32Array(tokens.length * C);
    tokens.forEach((token, t) => x.set(table.subarray(token * C, (token + 1) * C), t * C));
    const [a, b] = wrap ? wrap.window : [order.length, order.length];
    let y = this.run(x, order.slice(0, a), 0, cache, tap);
    if (wrap) {                         // the window by a solver; the cache keeps the first pass
      let first = true;
      const g = stream => {
        const out = this.run(stream, order.slice(a, b + 1), a, cache, tap, first);
        first = false;
        return out;
      };
      y = SOLVERS[wrap.method](g, y, wrap.K, wrap.T, wrap.beta);
      y = this.run(y, order.slice(b + 1), b + 1, cache, tap);
    }
    cache.position += tokens.length;
    return y;
  }
}

const NONE = new Float32Array(0);
const newCache = () => ({position: 0, slots: []});
const branch = cache => ({position: cache.position, slots: cache.slots.map(slot => ({...slot}))});

// ---- the wrapper, as in wrapper.py: g is one pass through the window

const SOLVERS = {
  naive(g, x, K) {
    for (let k = 0; k < K; k++) x = g(x);
    return x;
  },
  euler(g, x, K, T = 1) {
    for (let k = 0; k < K; k++) x = lerp(x, g(x), T / K);
    return x;
  },
  rk(g, x, K, T = 1, beta = 0.5) {
    const anchor = g(x);
    x = lerp(x, anchor, T / K);
    for (let k = 1; k < K; k++) x = lerp(x, g(x), T / K);
    return lerp(x, anchor, beta);
  },
};

// ---- what the page may ask, as in play.py

const MOST = 200, SLICE = 2, SHOWN = 16;        // layers of an order; questions of a slice; tokens
let about, raw, opened = {}, plain = {};

function checked(model, given) {
  const order = given.order || model.order, n = model.n_layer;
  if (!order.length || order.length > MOST) throw Error(`an order has 1 to ${MOST} layers`);
  const wrong = order.find(i => !(Number.isInteger(i) && 0 <= i && i < n));
  if (wrong !== undefined) throw Error(`the order names layer ${wrong}, but the layers are 0 to ${n - 1}`);
  if (!given.wrap) return {how: {order}, layers: order.length};
  const {window = 'mid4', method = 'rk', K = 3, T, beta} = given.wrap, depth = order.length;
  const middle = /^mid(\d+)$/.exec(window), ends = /^(\d+)-(\d+)$/.exec(window);
  const size = middle && Number(middle[1]), start = Math.floor(depth / 2) - Math.floor(size / 2);
  const [a, b] = middle ? [start, start + size - 1] : ends ? [Number(ends[1]), Number(ends[2])] : [];
  if (!(0 <= a && a <= b && b < depth))
    throw Error(`window=${window}: give first-last within 0 to ${depth - 1}, or mid4`);
  const within = (value, least, most) => value === undefined || value >= least && value <= most;
  if (K % 1 || !within(K, 1, 16) || !within(T, 1e-6, 1000) || !within(beta, 0, 1) || !SOLVERS[method])
    throw Error('K is 1 to 16, T is above 0 and at most 1,000, beta is 0 to 1, the method naive, euler or rk');
  if (method === 'naive' && T !== undefined || method !== 'rk' && beta !== undefined)
    throw Error(`${method} has no such dial: leave it empty`);
  return {how: {order, wrap: {window: [a, b], method, K, T, beta}}, layers: depth + (K - 1) * (b - a + 1)};
}

const encode = text => [...about.start, ...new TextEncoder().encode(text)];
function likely(model, stream, k) {             // of each token, the k likeliest next ones
  const V = model.vocab_size, logits = model.head(stream), rows = [];
  for (let t = 0; t < logits.length; t += V) {
    const p = softmax(logits.subarray(t, t + V));
    const best = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, k);
    rows.push(best.map(i => [about.shown[i], p[i]]));
  }
  return rows;
}

function look(model, given, tokens) {
  const {how, layers} = checked(model, given), C = model.n_embd, behind = [];
  const tap = (depth, x) => behind.push({depth, layer: how.order[depth],
    says: likely(model, x.slice(-SHOWN * C), 1).map(row => row[0])});
  const stream = model.hidden(tokens, {...how, tap});
  return {next: likely(model, stream.slice(-C), 8)[0], behind, layers, order: how.order};
}

function questions(task) {
  const asked = about.questions[task];
  if (!asked) throw Error(`there are no questions for ${task}: ${Object.keys(about.questions).join(', ')}`);
  return asked;
}

const ANSWERS = {
  about: () => about,
  order({model, text}) {
    const n = open(model).n_layer, order = [];
    let unique = 0;
    if (/[, ]/.test(text.trim())) order.push(...text.split(/[, ]+/).filter(Boolean).map(Number));
    else for (const part of text.replaceAll('×', 'x').split('-')) {
      const [, size, times] = /^(\d+)(?:x(\d+))?$/.exec(part) || [];
      if (!Number(size) || times === '0' || size * (times || 1) > MOST)
        throw Error(`the loop '${text}' has a segment '${part}', which is neither layers, such as 4, nor layers by times, such as 4x6`);
      for (let t = 0; t < (times || 1); t++) for (let i = 0; i < size; i++) order.push(unique + i);
      unique += Number(size);
    }
    if (unique && unique !== n) throw Error(`the loop '${text}' has ${unique} unique layers, but the model has ${n}`);
    return {order: checked(open(model), {order}).how.order};
  },
  look({model: name, how, prompt}) {
    const model = open(name), tokens = encode(prompt);
    if (!tokens.length || tokens.length > model.context)
      throw Error(`the prompt has ${tokens.length} tokens, 1 to ${model.context} fit`);
    if (plain.name !== name || plain.prompt !== prompt) plain = {name, prompt, says: look(model, {}, tokens)};
    const changed = look(model, how, tokens);
    return {plain: plain.says, changed, prompt: tokens.slice(-SHOWN).map(i => about.shown[i]),
            cost: changed.layers / plain.says.layers};
  },
  measure({model: name, how, task, slice}) {
    const asked = questions(task), model = open(name), some = asked.slice(slice * SLICE, (slice + 1) * SLICE);
    const right = some.filter(q => chosen(model, checked(model, how).how, q) === q.answer).length;
    return {of: Math.ceil(asked.length / SLICE), right, questions: some.length};
  },
  question({task, seed}) {
    const asked = questions(task), {prompt, options, answer} = asked[seed % asked.length];
    return {prompt, options, answer: options[answer]};
  },
};

// the likeliest option: the prompt is read once, and each option with its cache
function chosen(model, how, {prompt, options}) {
  const cache = newCache(), stream = model.hidden(encode(prompt), {...how, cache});
  const first = model.head(stream.slice(-model.n_embd)), V = model.vocab_size;
  const values = options.map(text => {
    const tokens = [...new TextEncoder().encode(text)];
    const rest = tokens.length > 1
      ? model.head(model.hidden(tokens.slice(0, -1), {...how, cache: branch(cache)})) : [];
    const logits = [...first, ...rest];
    return tokens.reduce((sum, token, t) => sum + Math.log(softmax(logits.slice(t * V, (t + 1) * V))[token]), 0);
  });
  return values.indexOf(Math.max(...values));
}

// a model, when it is first asked: each row of a tensor is signed 8-bit numbers times a scale
function open(name) {
  if (opened[name]) return opened[name];
  const weights = {};
  for (const [key, {at, rows, columns, scales}] of Object.entries(about.tensors[name])) {
    const numbers = new Int8Array(raw, at, rows * columns), scale = new Float32Array(raw, scales, rows);
    const t = weights[key] = new Float32Array(numbers);
    for (let row = 0, i = 0; row < rows; row++) for (let column = 0; column < columns; column++) t[i++] *= scale[row];
  }
  return opened[name] = new LM(about.models[name], weights);
}

onmessage = ({data: {id, name, body}}) => {
  try {
    if (name === 'begin') ({about, raw} = body);
    else postMessage({id, answer: ANSWERS[name](body)});
  } catch (error) { postMessage({id, error: error.message}); }
};
