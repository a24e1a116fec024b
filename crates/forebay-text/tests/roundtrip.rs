//! Round trips of arbitrary text through a tokenizer.

mod common;

use std::sync::OnceLock;

use common::fixture;
use forebay_format::Catalog;
use forebay_text::{TextStream, Tokenizer};
use proptest::prelude::*;

/// Returns two tiny BPE models and a SentencePiece one, as GGUF and as folders.
fn tokenizers() -> &'static [Tokenizer] {
    static TOKENIZERS: OnceLock<Vec<Tokenizer>> = OnceLock::new();
    TOKENIZERS.get_or_init(|| {
        let models = [
            "models/qwen3_moe",
            "models/llama3_rope",
            "models/mistral",
            "models/gemma3",
            "gguf/llama_k/llama_k-Q4_K_M.gguf",
            "gguf/gpt_oss/gpt_oss-BF16.gguf",
            "gguf/deepseek_v3/deepseek_v3-BF16.gguf",
            "gguf/mistral/mistral-F16.gguf",
            "gguf/gemma3/gemma3-BF16.gguf",
        ];
        let found = models.into_iter().filter_map(fixture);
        found.map(|path| Tokenizer::from_catalog(&Catalog::open(&path).unwrap()).unwrap()).collect()
    })
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[ \t\r\n]{0,8}[a-zA-Zé中😀'!0-9 \n]{0,40}",
        "(<\\|im_end\\|>|</s>|<bos>|▁|<0x0A>| |a){0,12}",
    ]
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], keep_special: bool) -> String {
    let mut stream = TextStream::new(tokenizer).keep_special(keep_special);
    let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
    text.push_str(&stream.finish());
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn text_comes_back(text in text()) {
        for tokenizer in tokenizers() {
            let ids = tokenizer.encode(&text, false, false).unwrap();
            let back = tokenizer.decode(&ids, true);
            // Tokenizers of folders may normalise (NFC), and SentencePiece writes the space as `▁`.
            if tokenizer.kind().starts_with("bpe") || text.is_ascii() {
                prop_assert_eq!(&back, &text, "{}", tokenizer.kind());
            }
            prop_assert_eq!(streamed(tokenizer, &ids, true), back);
        }
    }

    /// Random ids give cut-off characters and special tokens in any order.
    #[test]
    fn stream_equals_decode(ids in prop::collection::vec(0u32..520, 0..60)) {
        for tokenizer in tokenizers() {
            for keep_special in [false, true] {
                let whole = tokenizer.decode(&ids, keep_special);
                prop_assert_eq!(streamed(tokenizer, &ids, keep_special), whole.clone());
                // The bytes of the tokens are those of the text, except for a space before it.
                let bytes: Vec<u8> =
                    ids.iter().flat_map(|id| tokenizer.token_bytes(*id, keep_special)).collect();
                let joined = String::from_utf8_lossy(&bytes).into_owned();
                prop_assert!(joined == whole || joined.strip_prefix(' ') == Some(&whole));
            }
        }
    }

    /// No piece ends within a character, and no text is held back longer than necessary.
    #[test]
    fn pieces_are_whole_characters(text in "[aé中😀]{0,20}") {
        for tokenizer in tokenizers() {
            let ids = tokenizer.encode(&text, false, false).unwrap();
            let mut stream = TextStream::new(tokenizer);
            let mut so_far = String::new();
            for id in &ids {
                so_far += &stream.push(*id);
                prop_assert!(text.starts_with(&so_far), "{so_far:?} of {text:?}");
            }
            prop_assert_eq!(&so_far, &text);
        }
    }
}
