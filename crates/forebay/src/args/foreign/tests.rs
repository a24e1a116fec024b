//! Sends every row of the table, to every command that it is for.

use super::*;
use crate::args;

fn translated(line: &str) -> Result<Vec<String>, String> {
    let words = line.split(' ').map(OsString::from).collect();
    let words = translate(&args::command(), words)?;
    Ok(words.into_iter().map(|word| word.into_string().unwrap()).collect())
}

#[test]
fn what_means_the_same_is_translated() {
    for (theirs, ours) in [
        ("run -m m.gguf -p hi", "run m.gguf -p hi"),
        ("run -p hi -m m.gguf -ngl 99", "run m.gguf -p hi"),
        ("run -hf a/b:Q4_K_M", "run a/b:Q4_K_M"),
        ("run --model=m --temp=0.5", "run m --temperature 0.5"),
        ("run m --ctx-size 8192 -n -1 -s -1", "run m --ctx 8192"),
        ("run m --n-predict 10", "run m --max-tokens 10"),
        ("run m -ngl 0", "run m --device cpu"),
        ("run m -ctk q8_0 -ctv q8_0", "run m --kv-type q8_0"),
        ("run m -fa on -fa --color -cnv", "run m"),
        ("run m -fa what", "run m what"),
        ("run m --verbose --think=true", "run m --stats --think on"),
        ("run m -p -ngl", "run m -p -ngl"),
        ("run m -- -ngl 99", "run m -- -ngl 99"),
        (
            "serve -m m -a name -np 4 --host 0.0.0.0 --port 1",
            "serve m --name name --parallel 4 --host 0.0.0.0 --port 1",
        ),
        ("serve m --max-model-len 4096 --enforce-eager", "serve m --ctx 4096 --no-cuda-graph"),
        ("-m m -p hi", "run m -p hi"),
        ("-hf a/b", "run a/b"),
        ("--help", "--help"),
        ("-V", "-V"),
        ("pull a/b --jobs 2", "pull a/b --jobs 2"),
    ] {
        let ours = format!("forebay {ours}");
        assert_eq!(translated(&format!("forebay {theirs}")).unwrap().join(" "), ours, "{theirs}");
    }
}

#[test]
fn what_has_no_equal_gets_a_sentence() {
    for line in [
        "run m -ngl 20",
        "run m -ctk q8_0",
        "run m -ctk q8_0 -ctv f16",
        "run m --temp",
        "-ngl 99",
        "-mm x",
    ] {
        let why = translated(&format!("forebay {line}")).unwrap_err();
        assert!(why.len() > 10, "{line}: {why}");
    }
}

/// Every row either gives a line that parses, or a sentence. No name is in two rows, or means something else here.
#[test]
fn every_row_is_answered_in_every_command() {
    let known = args::command();
    let names: Vec<&str> = OPTIONS.iter().flat_map(|row| row.names).copied().collect();
    for (at, name) in names.iter().enumerate() {
        assert!(!names[..at].contains(name), "{name} is in two rows");
    }
    let mut sent = 0;
    for command in known.get_subcommands() {
        for row in OPTIONS.iter().filter(|row| row.is_for(command)) {
            for name in row.names.iter().filter(|name| !is_own(command, name)) {
                sent += 1;
                let (value, other) = match row.meaning {
                    Meaning::Values(values, _) => {
                        (values.first().map_or("x", |(value, _)| value), Some("17"))
                    }
                    Meaning::CacheType(_) => ("f16", None),
                    _ => ("1", None),
                };
                let lines = [Some(value), other];
                for value in lines.into_iter().flatten() {
                    let line = format!("forebay {} {name} {value}", command.get_name());
                    match translated(&line) {
                        Ok(words) => {
                            assert!(!words.iter().any(|word| word == name), "{line}: {words:?}")
                        }
                        Err(why) => assert!(why.split(' ').count() > 4, "{line}: {why}"),
                    }
                }
            }
        }
    }
    assert!(sent > 500, "{sent}");
}

/// What the sentences recommend exists.
#[test]
fn sentences_name_only_what_there_is() {
    let known = args::command();
    let sentences = OPTIONS.iter().filter_map(|row| match row.meaning {
        Meaning::Instead(sentence) | Meaning::Values(_, sentence) => Some(sentence),
        _ => None,
    });
    for sentence in sentences.chain(COMMANDS.iter().map(|(_, sentence)| *sentence)) {
        let words: Vec<&str> = sentence.split([' ', ',', ':', ';', '`']).collect();
        for pair in words.windows(2).filter(|pair| pair[0] == "forebay") {
            let is_verb = [
                "runs",
                "has",
                "takes",
                "uses",
                "reads",
                "computes",
                "decides",
                "chooses",
                "samples",
                "never",
                "keeps",
                "reserves",
                "separates",
                "breaks",
                "recognises",
                "uploads",
            ];
            assert!(
                is_verb.contains(&pair[1]) || known.find_subcommand(pair[1]).is_some(),
                "{sentence}"
            );
        }
        for option in words.iter().filter(|word| word.starts_with("--")) {
            let found =
                known.get_subcommands().chain([&known]).any(|command| is_own(command, option));
            assert!(found, "{option}: {sentence}");
        }
    }
    for (words, _) in COMMANDS {
        for word in *words {
            assert!(known.find_subcommand(word).is_none(), "{word} is a command");
        }
    }
}

#[test]
fn placeholders_name_values_and_are_no_questions() {
    for command in args::command().get_subcommands() {
        for argument in command.get_arguments() {
            for name in argument.get_value_names().unwrap_or_default() {
                let is_question = ["WHETHER", "HOW", "WHAT", "WHO", "WHEN", "WHERE", "AMONG"];
                assert!(!is_question.contains(&name.as_str()), "{} {name}", command.get_name());
            }
        }
    }
}
