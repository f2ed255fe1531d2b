// llama.cpp, as the package node-llama-cpp brings it: goes on greedily from each prompt of a JSON
// file. Usage: node llama.mjs MODEL.gguf PROMPTS.json COUNT  (the package's folder as the current one)
import fs from "fs";
import {createRequire} from "module";
import {pathToFileURL} from "url";

const [file, prompts, count] = process.argv.slice(2);
const found = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(found));
// as many threads as cores: with more it takes a hundred times as long
const llama = await getLlama({build: "never", gpu: false, logLevel: "error", maxThreads: 2});
const model = await llama.loadModel({modelPath: file});
const {tokens, texts} = JSON.parse(fs.readFileSync(prompts));
const more = [], likely = [];
let seconds = 0, drawn = 0;
for (const prompt of tokens) {
  const context = await model.createContext({contextSize: 512, threads: 2, flashAttention: false,
    experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"});
  const written = [], chances = [];
  let start;
  for await (const {token, confidence} of context.getSequence().evaluateWithMetadata(
      prompt, {confidence: true}, {temperature: 0})) {
    start ??= performance.now();            // the first token also pays for the prompt
    written.push(token);
    chances.push(confidence);
    if (written.length == +count) break;
  }
  seconds += (performance.now() - start) / 1000;
  drawn += written.length - 1;
  more.push(written);
  likely.push(chances);
  await context.dispose();
}
console.log(JSON.stringify({more, likely, words: texts.map(text => model.tokenize(text)), speed: drawn / seconds}));
process.exit(0);
