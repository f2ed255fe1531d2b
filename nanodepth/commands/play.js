// What the page asks, answered: model.py, retrofit.py and wrapper.py in plain JavaScript, in a worker.
// `nanodepth play RUN` puts it into the page, beside the weights. A sequence is a Float32Array
// of T rows; there is no batch.

// ---- a multiplication by a matrix, which is nearly all the work: WebAssembly adds four numbers at once

const SCRATCH = 1 << 20;                // numbers for what goes in, and as many for what comes out
let memory, multiply, free;

function prepare(numbers) {             // room for so many weights
  memory = new WebAssembly.Memory({initial: Math.ceil((4 * (numbers + 2 * SCRATCH)) / 65536) + 1});
  free = 4 * 2 * SCRATCH;
  try {
    multiply = new WebAssembly.Instance(new WebAssembly.Module(kernel()), {m: {m: memory}}).exports.f;
  } catch { multiply = null; }          // a browser without vectors: `linear` does it by itself
}

// The program f(W, x, y, T, I, O): y[t, o] = sum over i of W[o, i] x[t, i], for four t at once, whose
// sums stand in vectors of four numbers. W, x and y are places in memory, I is divisible by 4.
function kernel() {
  const leb = n => n < 128 ? [n] : [n & 127 | 128, ...leb(n >>> 7)];
  const get = i => [0x20, i], set = i => [0x21, i], tee = i => [0x22, i], int = n => [0x41, ...leb(n)];
  const add = 0x6a, mul = 0x6c, vadd = [0xfd, 0xe4, 1], vmul = [0xfd, 0xe6, 1];
  const load = [0xfd, 0, 4, 0], store = [0x38, 2, 0], zero = [0xfd, 12, ...Array(16).fill(0)];
  const lane = (v, k) => [...get(v), 0xfd, 0x1f, k], plus = (i, ...by) => [...get(i), ...by, add, ...set(i)];
  const [W, x, y, T, I, O, o, t, w, end, a, b, c, d, row, out] = Array(16).keys(), sums = [16, 17, 18, 19], v = 20;
  const loop = (begin, body, step, limit) =>        // do body, step while begin < limit
    [0x03, 0x40, ...body, ...step, ...get(begin), ...get(limit), 0x49, 0x0d, 0, 0x0b];
  const total = s => [...lane(s, 0), ...lane(s, 1), 0x92, ...lane(s, 2), 0x92, ...lane(s, 3), 0x92];
  const inner = loop(w, [...get(w), ...load, ...set(v), ...sums.flatMap((s, k) =>
      [...get(s), ...get(v), ...get(a + k), ...load, ...vmul, ...vadd, ...set(s)])],
    [w, a, b, c, d].flatMap(p => plus(p, ...int(16))), end);
  const tokens = loop(t, [
    ...get(W), ...get(o), ...get(row), mul, add, ...tee(w), ...get(row), add, ...set(end),
    ...get(x), ...get(t), ...get(row), mul, add, ...tee(a), ...get(row), add, ...tee(b),
    ...get(row), add, ...tee(c), ...get(row), add, ...set(d), ...sums.flatMap(s => [...zero, ...set(s)]), ...inner,
    ...get(y), ...get(t), ...get(O), mul, ...get(o), add, ...int(4), mul, add, ...set(out),
    ...sums.flatMap(s => [...get(out), ...total(s), ...store, ...plus(out, ...get(O), ...int(4), mul)])],
    plus(t, ...int(4)), T);
  const body = [...get(I), ...int(4), mul, ...set(row),
    ...loop(o, [...int(0), ...set(t), ...tokens], plus(o, ...int(1)), O), 0x0b];
  const part = (id, bytes) => [id, ...leb(bytes.length), ...bytes], code = [2, 10, 0x7f, 5, 0x7b, ...body];
  return new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, ...part(1, [1, 0x60, 6, ...Array(6).fill(0x7f), 0]),
    ...part(2, [1, 1, 109, 1, 109, 2, 0, 1]), ...part(3, [1, 0]), ...part(7, [1, 1, 102, 0, 0]),
    ...part(10, [1, ...leb(code.length), ...code])]);
}

function linear(W, x, T) {                                      // (T, I) -> (T, O)
  const I = x.length / T, O = W.length / I, fours = 4 * Math.ceil(T / 4);
  if (multiply && I % 4 === 0 && fours * Math.max(I, O) <= SCRATCH) {
    const from = new Float32Array(memory.buffer, 0, fours * I);
    from.set(x); from.fill(0, T * I);
    multiply(W.byteOffset, 0, 4 * SCRATCH, fours, I, O);
    return new Float32Array(memory.buffer, 4 * SCRATCH, T * O).slice();
  }
  const y = new Float32Array(T * O);
  for (let t = 0; t < T; t++) for (let o = 0; o < O; o++) {
    let sum = 0;
    for (let i = 0; i < I; i++) sum += W[o * I + i] * x[t * I + i];
    y[t * O + o] = sum;
  }
  return y;
}

// ---- the model, as in model.py and retrofit.py

function add(x, y) {
  const z = new Float32Array(x.length);
  for (let i = 0; i < x.length; i++) z[i] = x[i] + y[i];
  return z;
}
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
  const e = new Float32Array(x.length);
  let most = -Infinity, sum = 0;
  for (const v of x) if (v > most) most = v;
  for (let i = 0; i < x.length; i++) sum += e[i] = Math.exp(x[i] - most);
  for (let i = 0; i < x.length; i++) e[i] /= sum;
  return e;
}

class LM {
  constructor(about, weights) {
    Object.assign(this, about.config, {order: about.order, r: about.r, parts: about.parts, weights});
    const half = this.head_dim / 2, n = this.context * half;
    this.cos = new Float64Array(n); this.sin = new Float64Array(n);
    for (let t = 0; t < this.context; t++) for (let i = 0; i < half; i++) {
      const angle = t / this.rope_theta ** (i / half);
      this.cos[t * half + i] = Math.cos(angle); this.sin[t * half + i] = Math.sin(angle);
    }
  }
  weight(name) { return this.weights[`${name}.weight`]; }
  norm(name, x) { return rmsNorm(this.weight(name), x, this.norm_eps); }
  head(x) { return linear(this.weight('head'), this.norm('norm', x), x.length / this.n_embd); }

  rotate(x, heads, T, start) {          // turn each pair of channels by its position's angle
    const hd = this.head_dim, half = hd / 2;
    for (let t = 0; t < T; t++) for (let h = 0; h < heads; h++) for (let i = 0; i < half; i++) {
      const cos = this.cos[(start + t) * half + i], sin = this.sin[(start + t) * half + i];
      const at = (t * heads + h) * hd + i, a = x[at], b = x[at + half];
      x[at] = a * cos - b * sin; x[at + half] = b * cos + a * sin;
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
        let sum = 0;
        for (let i = 0, from = s * G * hd + g; i < hd; i++) sum += q[at + i] * keys[from + i];
        scores[s] = sum / Math.sqrt(hd);
      }
      const shares = softmax(scores);
      for (let s = 0; s < seen; s++)
        for (let i = 0, from = s * G * hd + g; i < hd; i++) y[at + i] += shares[s] * values[from + i];
    }
    return linear(this.weight(`${name}.o`), y, T);
  }

  mlp(name, x, T) {
    const gate = linear(this.weight(`${name}.gate`), x, T), up = linear(this.weight(`${name}.up`), x, T);
    for (let i = 0; i < gate.length; i++) gate[i] = gate[i] / (1 + Math.exp(-gate[i])) * up[i];
    return linear(this.weight(`${name}.down`), gate, T);
  }

  // Run layers on the stream; the first stands at position `depth` of the order. Without `keep` the
  // cache is only read, as later evaluations of a looped window do.
  run(x, order, depth, cache, tap, keep = true) {
    const T = x.length / this.n_embd;
    order.forEach((i, k) => {
      const slot = cache.slots[depth + k] ??= {keys: NONE, values: NONE}, layer = `layers.${i}`;
      x = add(x, this.attention(`${layer}.attn`, this.norm(`${layer}.attn_norm`, x), T, slot, cache.position, keep));
      x = add(x, this.mlp(`${layer}.mlp`, this.norm(`${layer}.mlp_norm`, x), T));
      tap?.(i, x);
    });
    return x;
  }

  hidden(tokens, {order = this.order, wrap, r = this.r, cache = newCache(), tap} = {}) {
    const C = this.n_embd, table = this.weight('embed');
    let x = new Float32Array(tokens.length * C);
    tokens.forEach((token, t) => x.set(table.subarray(token * C, (token + 1) * C), t * C));
    if (this.parts) x = this.recur(x, r, cache, tap);
    else {
      const [a, b] = wrap ? wrap.window : [order.length, order.length];
      x = this.run(x, order.slice(0, a), 0, cache, tap);
      if (wrap) {                       // the window by a solver; the cache keeps the first pass
        let first = true;
        const g = stream => {
          const out = this.run(stream, order.slice(a, b + 1), a, cache, tap, first);
          first = false;
          return out;
        };
        x = SOLVERS[wrap.method](g, x, wrap.K, wrap.T, wrap.beta);
        x = this.run(x, order.slice(b + 1), b + 1, cache, tap);
      }
    }
    cache.position += tokens.length;
    return x;
  }

  recur(x, r, cache, tap) {             // prelude; r times adapter and core; coda
    const [prelude, core, coda] = this.parts, C = this.n_embd, T = x.length / C;
    const e = this.run(x, prelude, 0, cache, tap), mixed = new Float32Array(2 * T * C);
    let s = this.weights.first_states.slice(cache.position * C, (cache.position + T) * C);
    for (let k = 0; k < r; k++) {
      for (let t = 0; t < T; t++) {
        mixed.set(s.subarray(t * C, (t + 1) * C), 2 * t * C);
        mixed.set(e.subarray(t * C, (t + 1) * C), (2 * t + 1) * C);
      }
      const entered = this.weight('adapter') ? linear(this.weight('adapter'), mixed, T) : add(s, e);
      s = this.run(entered, core, prelude.length + k * core.length, cache, tap);
    }
    return this.run(s, coda, prelude.length + r * core.length, cache, tap);
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

const MOST = 200, SHOWN = 16;           // layers of an order; tokens
let about, opened = {}, raws = {}, plain = {};

const middleOf = (depth, n) => about.middle[`${depth},${n}`] ?? Math.floor(depth / 2) - Math.floor(n / 2);      // as hosts.pick_window

function checked(model, given) {                // how it runs, and which layers one after the other
  if (model.parts) {
    const r = given.r ?? model.r, [prelude, core, coda] = model.parts;
    if (!(Number.isInteger(r) && r >= 1 && r <= 32)) throw Error('r is 1 to 32');
    return {how: {r}, order: [...prelude, ...Array(r).fill(core).flat(), ...coda], layers: prelude.length + r * core.length + coda.length};
  }
  const order = given.order || model.order, n = model.n_layer;
  if (!order.length || order.length > MOST) throw Error(`an order has 1 to ${MOST} layers`);
  const wrong = order.find(i => !(Number.isInteger(i) && 0 <= i && i < n));
  if (wrong !== undefined) throw Error(`the order names layer ${wrong}, but the layers are 0 to ${n - 1}`);
  if (!given.wrap) return {how: {order}, order, layers: order.length};
  const {window = 'mid4', method = 'rk', K = 3, T, beta} = given.wrap, depth = order.length;
  const middle = /^mid(\d+)$/.exec(window), ends = /^(\d+)-(\d+)$/.exec(window);
  const size = middle && Number(middle[1]), start = middle && middleOf(depth, size);
  const [a, b] = middle ? [start, start + size - 1] : ends ? [Number(ends[1]), Number(ends[2])] : [];
  if (!(0 <= a && a <= b && b < depth)) throw Error(`window=${window}: give first-last within 0 to ${depth - 1}, or mid4`);
  const within = (value, least, most) => value === undefined || value >= least && value <= most;
  if (K % 1 || !within(K, 1, 16) || !within(T, 1e-6, 1000) || !within(beta, 0, 1) || !SOLVERS[method])
    throw Error('K is 1 to 16, T is above 0 and at most 1,000, beta is 0 to 1, the method naive, euler or rk');
  if (method === 'naive' && T !== undefined || method !== 'rk' && beta !== undefined)
    throw Error(`${method} has no such dial: leave it empty`);
  return {how: {order, wrap: {window: [a, b], method, K, T, beta}}, order, layers: depth + (K - 1) * (b - a + 1)};
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
  const {how, layers, order} = checked(model, given), C = model.n_embd, behind = [];
  const tap = (layer, x) => behind.push({layer, says: likely(model, x.slice(-SHOWN * C), 1).map(row => row[0])});
  const stream = model.hidden(tokens, {...how, tap});
  return {next: likely(model, stream.slice(-C), 8)[0], behind, layers, order};
}

const ANSWERS = {
  weights({model, raw}) { raws[model] = raw; },
  order({model, text}) {                        // a notation, or layers by number
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
    return {order: checked(open(model), {order}).order};
  },
  look({model: name, how, prompt}) {
    const model = open(name), tokens = encode(prompt);
    if (!prompt || tokens.length > model.context)
      throw Error(`the prompt has ${tokens.length} tokens, 2 to ${model.context} fit`);
    if (plain.name !== name || plain.prompt !== prompt) plain = {name, prompt, says: look(model, {}, tokens)};
    const same = !Object.keys(how).length;
    return {plain: plain.says, changed: same ? plain.says : look(model, how, tokens),
            prompt: tokens.slice(-SHOWN).map(i => about.shown[i])};
  },
  measure({model: name, how, task, first, last}) {      // some of the questions
    const model = open(name), {how: way} = checked(model, how), asked = about.questions[task].slice(first, last);
    return {right: asked.filter(q => chosen(model, way, q) === q.answer).length, questions: asked.length};
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
  const weights = {}, raw = raws[name];
  for (const [key, {at, rows, columns, scales}] of Object.entries(about.tensors[name])) {
    const numbers = new Int8Array(raw, at, rows * columns), scale = new Float32Array(raw, scales, rows);
    const t = weights[key] = new Float32Array(memory.buffer, free, rows * columns);
    free += 16 * Math.ceil(rows * columns / 4);
    for (let row = 0, i = 0; row < rows; row++) for (let column = 0; column < columns; column++, i++) t[i] = numbers[i] * scale[row];
  }
  delete raws[name];
  return opened[name] = new LM(about.models[name], weights);
}

onmessage = ({data: {id, name, body}}) => {
  try {
    if (name === 'begin') { about = body; prepare(about.numbers); }
    else postMessage({id, answer: ANSWERS[name](body)});
  } catch (error) { postMessage({id, error: error.message}); }
};
