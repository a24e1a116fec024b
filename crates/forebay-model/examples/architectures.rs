//! Prints the names of the architectures that run: those of families, and those that GGUF files and `config.json` have.
//! `cargo xtask` compares them with the documentation and with other programs.
//!
//! `cargo run --release -p forebay-model --example architectures`

use forebay_model::arch::known_families;

fn main() {
    for family in known_families() {
        println!("family {}", family.name);
        let experts = if family.feed_forward.experts { "experts" } else { "dense" };
        for name in family.files.gguf {
            println!("gguf {name} {experts}");
        }
        for name in family.files.huggingface {
            println!("model_type {name} {experts}");
        }
    }
}
