// Colours code: comments, strings, numbers and keywords. One pass with one pattern per family of languages, so its time is linear.

/** Longer code stays plain. */
const CODE_MAX = 100_000;

const words = (text) => new Set(text.split(" "));
const C_WORDS = "auto break case catch class const continue default defer delete do else enum extern false final finally for func function goto if implements import in inline instanceof int interface let long match mod mut namespace new nil null nullptr operator override package private protected public pub register return self short signed sizeof static struct super switch template this throw throws trait true try type typedef typename typeof union unsafe unsigned use using var virtual void volatile where while yield async await as from of export extends fn impl dyn loop move ref crate bool boolean byte char double float string val fun object when is range chan go map select undefined debugger";
const HASH_WORDS = "and as assert async await begin break case class continue def del do done elif else elsif end esac except export exec false finally fi for from function global if import in is lambda let local match module next nil None nonlocal not null of or pass raise readonly require rescue return self set shift super switch then True False true try undef unless unset until when while with yield echo source FROM RUN COPY CMD ENV ENTRYPOINT WORKDIR EXPOSE ARG on off yes no TRUE FALSE NULL";
const DASH_WORDS = "select from where insert into values update set delete create table index view drop alter add column primary key foreign references join left right inner outer full on group by order having limit offset union all distinct as and or not null is in like between case when then else end exists begin commit rollback with returning default unique check true false local function do repeat until if elseif while for return break nil data type module import let where class instance deriving";

const STRING = /"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?/;
const NUMBER = /\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*/;
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/u;

/** Makes a family from the patterns of its comments and strings. */
function family(comment, string, keywords, { anyCase = false } = {}) {
  const parts = [comment && `(?<comment>${comment.source})`, `(?<string>${string.source})`, `(?<number>${NUMBER.source})`, `(?<word>${WORD.source})`];
  return { pattern: new RegExp(parts.filter(Boolean).join("|"), "gu"), keywords: words(keywords), anyCase };
}

const TICKS = /`(?:[^`\\]|\\[^])*`?/;
const C = family(/\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/, new RegExp(`${TICKS.source}|"(?:[^"\\\\\\n]|\\\\[^])*"?|'(?:[^'\\\\\\n]|\\\\[^])*'`), C_WORDS);
// A lifetime of Rust is no string.
const RUST = family(/\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/, /"(?:[^"\\]|\\[^])*"?|'(?:[^'\\\n]|\\[^\n]{1,8})'/, C_WORDS);
const HASH = family(/#[^\n]*/, new RegExp(`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING.source}`), HASH_WORDS);
const DASH = family(/--[^\n]*|\/\*[^]*?(?:\*\/|$)/, STRING, DASH_WORDS, { anyCase: true });
const DATA = family(null, STRING, "true false null");
const MARKUP = { pattern: /(?<comment><!--[^]*?(?:-->|$))|(?<string>"[^"\n<>]*"|'[^'\n<>]*')|(?<word><\/?[\w:-]+|\/?>)/gu, keywords: null };
const STYLE = family(/\/\*[^]*?(?:\*\/|$)/, STRING, "important media import supports keyframes");
const DIFF = { pattern: /^(?:(?<added>\+[^\n]*)|(?<removed>-[^\n]*)|(?<comment>@@[^\n]*))/gmu, keywords: null };

const LANGUAGES = new Map();
for (const [names, kind] of [
  ["c h cpp c++ cc hpp cuda cu java js javascript jsx mjs ts typescript tsx go golang cs csharp c# kotlin kt swift scala dart php zig proto glsl wgsl", C],
  ["rust rs", RUST],
  ["python py python3 sh bash shell zsh fish console ruby rb perl pl yaml yml toml ini conf make makefile dockerfile docker r julia jl elixir ex cmake nix powershell ps1", HASH],
  ["sql postgresql mysql sqlite lua haskell hs elm ada", DASH],
  ["json jsonc json5 jsonl ndjson", DATA],
  ["html xml svg xhtml vue svelte", MARKUP],
  ["css scss less", STYLE],
  ["diff patch", DIFF],
]) for (const name of names.split(" ")) LANGUAGES.set(name, kind);

/** Splits code into `[kind, text]`. The kind is empty for plain text. Returns null for a language that is not known. */
export function parts(code, language) {
  const kind = LANGUAGES.get(language.toLowerCase());
  if (!kind || code.length > CODE_MAX) return null;
  const found = [];
  let from = 0;
  for (const match of code.matchAll(kind.pattern)) {
    const [text] = match;
    const name = kindOf(match.groups, kind, text);
    if (!name || !text) continue;
    if (match.index > from) found.push(["", code.slice(from, match.index)]);
    found.push([name, text]);
    from = match.index + text.length;
  }
  if (from < code.length) found.push(["", code.slice(from)]);
  return found;
}

function kindOf(groups, { keywords, anyCase }, text) {
  for (const name of ["comment", "string", "number", "added", "removed"]) if (groups[name] !== undefined) return name;
  if (!keywords || keywords.has(anyCase ? text.toLowerCase() : text)) return "keyword";
  return "";
}
