// What the page asks, answered: model.py, retrofit.py and wrapper.py in plain JavaScript, in a worker.
// `nanodepth play RUN` puts it into the page, beside the weights. A sequence is a Float32Array
// of T rows; there is no batch.

// ---- a multiplication by a matrix, which is nearly all the work: WebAssembly takes four numbers at once

const SCRATCH = 1 << 20;                // numbers for what goes in, and as many for what comes out
let memory, kernels = {};

function prepare(bytes) {               // room for all weights, of one byte each
  memory = new WebAssembly.Memory({initial: Math.ceil((bytes + 8 * SCRATCH) / 65536) + 1});
  try {
    for (const n of [1, 4])
      kernels[n] = new WebAssembly.Instance(new WebAssembly.Module(kernel(n)), {m: {m: memory}}).exports.f;
  } catch { kernels = {}; }             // a browser without vectors: `linear` does it by itself
}

// The program f(W, x, y, I, O): y[k, o] = sum over i of W[o, i] x[k, i], for n tokens k at once. W, x
// and y are places in memory. W has 8-bit numbers; sixteen are widened at a time, so 16 divides I.
// With four tokens each has a sum, with one each four numbers have: no sum waits for the one before.
function kernel(n) {
  const leb = n => n < 128 ? [n] : [n & 127 | 128, ...leb(n >>> 7)], simd = (code, ...rest) => [0xfd, ...leb(code), ...rest];
  const get = i => [0x20, i], set = i => [0x21, i], int = n => [0x41, n & 127 | 128, n >> 7], add = 0x6a, mul = 0x6c;
  const plus = (i, ...by) => [...get(i), ...by, add, ...set(i)], load = offset => simd(0, 4, offset), zero = simd(12, ...Array(16).fill(0));
  const [W, x, y, I, O, o, w, end, out] = Array(9).keys(), tokens = [9, 10, 11, 12].slice(0, n), sums = [13, 14, 15, 16], v = 17, four = 18;
  const loop = (begin, body, step, limit) =>        // do body, step while begin < limit
    [0x03, 0x40, ...body, ...step, ...get(begin), ...get(limit), 0x49, 0x0d, 0, 0x0b];
  const eight = offset => [...get(w), ...simd(1, 3, offset), ...set(v)];                // to 16 bits each
  const widened = half => [...get(v), ...simd(0xa7 + half), ...simd(0xfa), ...set(four)]; // low or high four, to floats
  const part = j => [...(j % 2 ? [] : eight(4 * j)), ...widened(j % 2), ...tokens.flatMap((token, k) => {
    const sum = sums[n > 1 ? k : j];
    return [...get(sum), ...get(four), ...get(token), ...load(16 * j), ...simd(0xe6), ...simd(0xe4), ...set(sum)];
  })];
  const inner = loop(w, [0, 1, 2, 3].flatMap(part), [...plus(w, ...int(16)), ...tokens.flatMap(token => plus(token, ...int(64)))], end);
  const total = s => [0, 1, 2, 3].flatMap(k => [...get(s), ...simd(0x1f, k), ...(k ? [0x92] : [])]);
  const totals = n > 1 ? sums.map(total) : [sums.flatMap((s, j) => [...total(s), ...(j ? [0x92] : [])])];
  const row = [...get(W), ...get(o), ...get(I), mul, add, ...set(w), ...get(w), ...get(I), add, ...set(end),
    ...tokens.flatMap((token, k) => [...get(x), ...get(I), ...int(4 * k), mul, add, ...set(token)]),
    ...sums.flatMap(s => [...zero, ...set(s)]), ...inner, ...get(y), ...get(o), ...int(4), mul, add, ...set(out),
    ...totals.flatMap(sum => [...get(out), ...sum, 0x38, 2, 0, ...plus(out, ...get(O), ...int(4), mul)])];
  const body = [...loop(o, row, plus(o, ...int(1)), O), 0x0b];
  const section = (id, bytes) => [id, ...leb(bytes.length), ...bytes], code = [2, 8, 0x7f, 6, 0x7b, ...body];
  return new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, ...section(1, [1, 0x60, 5, ...Array(5).fill(0x7f), 0]),
    ...section(2, [1, 1, 109, 1, 109, 2, 0, 1]), ...section(3, [1, 0]), ...section(7, [1, 1, 102, 0, 0]),
    ...section(10, [1, ...leb(code.length), ...code])]);
}

// A tensor: rows of signed 8-bit numbers, each row times a scale, filled up to a multiple of 16.
class Tensor {
  constructor({rows, columns, at, scales}, begin) {
    this.columns = columns; this.width = 16 * Math.ceil(columns / 16); this.rows = rows;
    this.numbers = new Int8Array(memory.buffer, begin + at, rows * this.width);
    this.scales = new Float32Array(memory.buffer, begin + scales, rows);
  }
  row(i) { return Float32Array.from(this.numbers.subarray(i * this.width, i * this.width + this.columns), v => v * this.scales[i]); }
}

function linear(W, x, T) {                                      // (T, columns) -> (T, rows)
  const {width: I, columns, rows: O} = W, y = new Float32Array(T * O);
  for (let t = 0, n; t < T; t += n) {
    n = kernels[4] && T - t >= 4 ? 4 : 1;
    const from = new Float32Array(memory.buffer, 0, n * I), to = new Float32Array(memory.buffer, 4 * SCRATCH, n * O);
    from.fill(0);
    for (let k = 0; k < n; k++) from.set(x.subarray((t + k) * columns, (t + k + 1) * columns), k * I);
    if (kernels[n]) kernels[n](W.numbers.byteOffset, 0, 4 * SCRATCH, I, O);
    else for (let o = 0; o < O; o++) {
      let sum = 0;
      for (let i = 0; i < columns; i++) sum += W.numbers[o * I + i] * from[i];
      to[o] = sum;
    }
    for (let k = 0, at = t * O; k < n; k++) for (let o = 0; o < O; o++) y[at++] = to[k * O + o] * W.scales[o];
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
    Object.assign(this, about.config, {order: about.order, r: about.r, parts: about.parts, weights, vectors: {}});
    const half = this.head_dim / 2, n = this.context * half;
    this.cos = new Float64Array(n); this.sin = new Float64Array(n);
    for (let t = 0; t < this.context; t++) for (let i = 0; i < half; i++) {
      const angle = t / this.rope_theta ** (i / half);
      this.cos[t * half + i] = Math.cos(angle); this.sin[t * half + i] = Math.sin(angle);
    }
  }
  weight(name) { return this.weights[`${name}.weight`]; }
  norm(name, x) { return rmsNorm(this.vectors[name] ??= this.weight(name).row(0), x, this.norm_eps); }
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
    const normed = (part, x) => this.qk_norm ? this.norm(`${name}.${part}_norm`, x) : x;        // Qwen 3's
    const q = this.rotate(normed('q', linear(this.weight(`${name}.q`), x, T)), H, T, start);
    const k = this.rotate(normed('k', linear(this.weight(`${name}.k`), x, T)), G, T, start);
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
    tokens.forEach((token, t) => x.set(table.row(token), t * C));
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
    let s = new Float32Array(T * C);
    for (let t = 0; t < T; t++) s.set(this.weights.first_states.row(cache.position + t), t * C);
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

// ---- text to tokens: bytes, or pairs of neighbours that are merged, as `tokenizers` does it

class Bytes {
  constructor({start, shown}) { this.start = start; this.texts = shown; }
  encode(text) { return [...this.start, ...new TextEncoder().encode(text)]; }
  shown(i) { return this.texts[i]; }
}

class Merging {
  constructor({vocab, merges, added, splits, nfc, whole, start}) {
    let odd = 256;                      // GPT-2 writes each byte as a letter
    this.letters = Array.from({length: 256}, (_, b) => String.fromCodePoint(33 <= b && b <= 126 || 161 <= b && b <= 172 || 174 <= b ? b : odd++));
    this.bytes = new Map(this.letters.map((letter, b) => [letter, b]));
    this.ids = new Map(vocab.map((text, i) => [text, i]));
    this.ranks = new Map(merges.map((pair, rank) => [pair, rank]));
    this.cuts = splits.map(text => new RegExp(text, 'gu'));
    this.special = new Map(Object.entries(added)); this.names = new Map(Object.entries(added).map(([text, i]) => [i, text]));
    const quoted = Object.keys(added).sort((a, b) => b.length - a.length).map(text => text.replace(/[|\\{}()[\]^$+*?.\/-]/g, '\\$&'));
    this.names.size && (this.marks = new RegExp(quoted.join('|'), 'gu'));
    Object.assign(this, {vocab, nfc, whole, start, words: new Map()});
  }
  encode(text) {
    const parts = this.marks ? pieces(text, this.marks) : [text];
    return [...this.start, ...parts.flatMap(part => this.special.has(part) ? [this.special.get(part)]
      : this.cuts.reduce((list, cut) => list.flatMap(piece => pieces(piece, cut)), [this.nfc ? part.normalize('NFC') : part]).flatMap(word => this.merged(word)))];
  }
  merged(word) {                        // the pair of the lowest rank first, until no pair has one
    if (!this.words.has(word)) {
      let parts = [...new TextEncoder().encode(word)].map(b => this.letters[b]);
      if (this.whole && this.ids.has(parts.join(''))) parts = [parts.join('')];
      for (;;) {
        let best = Infinity, at;
        for (let k = 0; k + 1 < parts.length; k++) {
          const rank = this.ranks.get(`${parts[k]} ${parts[k + 1]}`);
          if (rank < best) { best = rank; at = k; }
        }
        if (best === Infinity) break;
        parts.splice(at, 2, parts[at] + parts[at + 1]);
      }
      this.words.set(word, parts.map(part => this.ids.get(part)));
    }
    return this.words.get(word);
  }
  decode(tokens) {
    const bytes = tokens.flatMap(i => this.names.has(i) ? [...new TextEncoder().encode(this.names.get(i))] : [...this.vocab[i] ?? ''].map(letter => this.bytes.get(letter)));
    return new TextDecoder().decode(new Uint8Array(bytes));
  }
  shown(i) { return this.decode([i]); }
}

function pieces(text, cut) {            // what matches and what lies between, in order
  const found = [];
  let from = 0;
  for (const match of text.matchAll(cut)) {
    found.push(text.slice(from, match.index), match[0]);
    from = match.index + match[0].length;
  }
  return [...found, text.slice(from)].filter(Boolean);
}

// ---- what the page may ask, as in play.py

const MOST = 200, SHOWN = 16, MOST_TOKENS = 256;       // layers of an order; tokens
let about, tokenizer, opened = {}, plain = {}, last = {};

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

function likely(model, stream, k) {             // of each token, the k likeliest next ones, the likeliest first
  const V = model.vocab_size, logits = model.head(stream), rows = [];
  for (let t = 0; t < logits.length; t += V) {
    const p = softmax(logits.subarray(t, t + V)), best = [];
    p.forEach((v, i) => {
      if (best.length === k && v <= p[best[k - 1]]) return;
      best.push(i); best.sort((a, b) => p[b] - p[a] || a - b);
      if (best.length > k) best.pop();
    });
    rows.push(best.map(i => [tokenizer.shown(i), p[i], i]));
  }
  return rows;
}

function look(model, given, tokens) {
  const {how, layers, order} = checked(model, given), C = model.n_embd, behind = [];
  const tap = (layer, x) => behind.push({layer, says: likely(model, x.slice(-SHOWN * C), 1).map(row => row[0])});
  const stream = model.hidden(tokens, {...how, tap});
  return {next: likely(model, stream.slice(-C), 8)[0], behind, layers, order};
}

function tokensOf(model, prompt) {
  const tokens = tokenizer.encode(prompt), most = Math.min(model.context, MOST_TOKENS);
  if (!prompt || tokens.length > most) throw Error(`the prompt has ${tokens.length} tokens, 2 to ${most} fit`);
  return tokens;
}

// A prompt that was read in some way, with the stream behind each layer, for all that is asked of it.
function reading({model: name, how: given, prompt}) {
  const key = JSON.stringify([name, given, prompt]);
  if (last.key !== key) {
    const model = open(name), tokens = tokensOf(model, prompt), {how, order, layers} = checked(model, given), streams = [], cache = newCache();
    const stream = model.hidden(tokens, {...how, cache, tap: (layer, x) => streams.push({layer, x})});
    last = {key, model, how, order, layers, tokens, streams, stream, cache};
  }
  return last;
}

const ANSWERS = {
  weights({model, at, raw}) { new Uint8Array(memory.buffer).set(new Uint8Array(raw), begin(model) + at); },
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
    const model = open(name), tokens = tokensOf(model, prompt);
    if (plain.name !== name || plain.prompt !== prompt) plain = {name, prompt, says: look(model, {}, tokens)};
    const same = !Object.keys(how).length;
    return {plain: plain.says, changed: same ? plain.says : look(model, how, tokens),
            prompt: tokens.slice(-SHOWN).map(i => tokenizer.shown(i))};
  },
  // of a larger model each part is asked for by itself, so that a change need not wait for all of it
  next(asked) {
    const {model, stream, tokens, order, layers} = reading(asked);
    return {next: likely(model, stream.slice(-model.n_embd), 40)[0], order, layers, tokens: tokens.map(i => tokenizer.shown(i))};
  },
  loss(asked) {
    const {model, stream, tokens} = reading(asked), V = model.vocab_size, C = model.n_embd, logits = model.head(stream.slice(0, -C));
    return tokens.slice(1).reduce((sum, token, t) => sum - Math.log(softmax(logits.subarray(t * V, (t + 1) * V))[token]), 0) / (tokens.length - 1);
  },
  layer(asked) {                                // what the layer at a place of the run would say after each of the last n tokens
    const {model, streams} = reading(asked), {layer, x} = streams[asked.at], C = model.n_embd;
    const says = likely(model, x.slice(-asked.n * C), asked.n > 1 ? 1 : 10);
    return {layer, says: says.map(row => row[0]), ten: says.at(-1).map(([, , i]) => i), of: streams.length};
  },
  write(asked) {                                // one more token of the text that it goes on with
    const found = reading(asked), {model, how} = found;
    found.after ??= {tokens: [], cache: branch(found.cache), stream: found.stream.slice(-model.n_embd)};
    const {tokens, cache, stream} = found.after;
    if (found.tokens.length + tokens.length < model.context) {
      const [[[, , token]]] = likely(model, stream, 1);
      tokens.push(token);
      found.after.stream = model.hidden([token], {...how, cache});
    }
    return tokenizer.decode(tokens);
  },
  measure({model: name, how, task, first, last}) {      // some of the questions
    const model = open(name), {how: way} = checked(model, how), asked = about.questions[task].slice(first, last);
    return {right: asked.filter(q => chosen(model, way, q) === q.answer).length, questions: asked.length};
  },
};

// the likeliest option: the prompt is read once, and each option with its cache
function chosen(model, how, {prompt, options}) {
  const cache = newCache(), stream = model.hidden(tokenizer.encode(prompt), {...how, cache});
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

const begin = name => 8 * SCRATCH + about.begins[name];     // where the bytes of a model stand in memory

function open(name) {           // a model, when it is first asked
  return opened[name] ??= new LM(about.models[name], Object.fromEntries(
    Object.entries(about.tensors[name]).map(([key, place]) => [key, new Tensor(place, begin(name))])));
}

onmessage = ({data: {id, name, body}}) => {
  try {
    if (name === 'begin') { about = body; prepare(about.bytes); tokenizer = about.merges ? new Merging(about) : new Bytes(about); }
    else postMessage({id, answer: ANSWERS[name](body)});
  } catch (error) { postMessage({id, error: error.message}); }
};
