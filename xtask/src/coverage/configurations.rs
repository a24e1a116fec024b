//! Configuration classes of transformers: which has experts, and which is the language model inside another.

use std::collections::BTreeMap;

use super::python::{Token, inside, items, tokens};

/// Fields that hold a number of experts.
const EXPERT_COUNTS: [&str; 4] =
    ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
/// Variables of a class that name the classes of its parts.
const PARTS: [&str; 2] = ["sub_configs", "sub_configs_defaults"];
/// The part of a model with images or sound that is a language model.
const LANGUAGE: &str = "text_config";
/// Base classes and parts are followed at most this far.
const HOPS_MAX: usize = 8;

/// The configuration of a part of a model.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Class(String),
    ModelType(String),
}

#[derive(Debug, Default)]
struct Class {
    bases: Vec<String>,
    model_type: Option<String>,
    counts_experts: bool,
    parts: BTreeMap<String, Part>,
}

/// Classes by their names.
#[derive(Debug, Default)]
pub struct Configurations(BTreeMap<String, Class>);

impl Configurations {
    /// Adds the classes of a Python source.
    pub fn add(&mut self, source: &str) {
        let mut class: Option<&mut Class> = None;
        let mut at = 0;
        for line in source.split_inclusive('\n') {
            let rest = &source[at..];
            at += line.len();
            if let Some(head) = line.strip_prefix("class ") {
                let words = tokens(head).into_iter().filter_map(|token| match token {
                    Token::Word(word) => Some(word),
                    _ => None,
                });
                let mut words = words.collect::<Vec<_>>().into_iter();
                let name = words.next().unwrap_or_default();
                class = Some(self.0.entry(name).or_default());
                class.iter_mut().for_each(|class| class.bases = words.by_ref().collect());
            } else if line.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '@') {
                class = None;
            } else if let Some(class) = &mut class {
                class.read_line(line, rest);
            }
        }
    }

    /// Returns the model type of a model's language model, and true if it has experts. `model_type` is that of the whole
    /// model, and `class` its configuration. Returns `None` if the class is unknown.
    pub fn language_model(
        &self,
        model_type: &str,
        class: &str,
        classes: &BTreeMap<String, String>,
    ) -> Option<(String, bool)> {
        let (mut model_type, mut class) = (model_type, class);
        for _ in 0..HOPS_MAX {
            match self.part(class, LANGUAGE, HOPS_MAX) {
                Some(Part::ModelType(other)) => {
                    model_type = other;
                    class = classes.get(other)?;
                }
                Some(Part::Class(other)) => {
                    model_type = self.0.get(other)?.model_type.as_deref().unwrap_or(model_type);
                    class = other;
                }
                None => break,
            }
        }
        self.0.get(class)?;
        Some((model_type.to_owned(), self.has_experts(class, HOPS_MAX)))
    }

    /// Returns a part of a class, which may be inherited.
    fn part(&self, class: &str, part: &str, hops: usize) -> Option<&Part> {
        let class = self.0.get(class)?;
        let hops = hops.checked_sub(1)?;
        let inherited = || class.bases.iter().find_map(|base| self.part(base, part, hops));
        class.parts.get(part).or_else(inherited)
    }

    /// Returns true if a class, one that it inherits from, or a part of it counts experts.
    fn has_experts(&self, class: &str, hops: usize) -> bool {
        let (Some(class), Some(hops)) = (self.0.get(class), hops.checked_sub(1)) else {
            return false;
        };
        let parts = class.parts.values().filter_map(|part| match part {
            Part::Class(name) => Some(name),
            Part::ModelType(_) => None,
        });
        class.counts_experts || class.bases.iter().chain(parts).any(|of| self.has_experts(of, hops))
    }
}

impl Class {
    /// Reads a line of the class. `rest` is the source from this line on.
    fn read_line(&mut self, line: &str, rest: &str) {
        let field = line.trim_start();
        let is_own = line.len() - field.len() == 4;
        let field = field.strip_prefix("self.").unwrap_or(field);
        let name = field.split([' ', ':', '=']).next().unwrap_or_default();
        let value = field[name.len()..].trim_start();
        if !value.starts_with([':', '=']) {
            return;
        }
        self.counts_experts |= EXPERT_COUNTS.contains(&name);
        if is_own && name == "model_type" {
            self.model_type = tokens(line).into_iter().find_map(|token| match token {
                Token::Text(text) => Some(text),
                _ => None,
            });
        }
        if is_own && PARTS.contains(&name) {
            let equals = rest.find('=').unwrap_or_default();
            let tokens = inside(&tokens(&rest[equals..])).unwrap_or_default();
            self.parts.extend(items(&tokens).into_iter().filter_map(part));
        }
    }
}

/// Returns the name of a part and what it is, from `"name": Class`, `"name": Spec(config_class=Class)` or
/// `"name": Spec(config_class=AutoConfig, model_type="type")`.
fn part(item: &[Token]) -> Option<(String, Part)> {
    let [Token::Text(name), Token::Sign(':'), Token::Word(class), arguments @ ..] = item else {
        return None;
    };
    let arguments = inside(arguments).unwrap_or_default();
    let argument = |name: &str| {
        items(&arguments).into_iter().find_map(|item| match item {
            [Token::Word(key), Token::Sign('='), value] if key == name => Some(value.clone()),
            _ => None,
        })
    };
    let part = match (argument("model_type"), argument("config_class")) {
        (Some(Token::Text(model_type)), _) => Part::ModelType(model_type),
        (_, Some(Token::Word(class))) => Part::Class(class),
        _ => Part::Class(class.clone()),
    };
    Some((name.clone(), part))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
class TextConfig(PreTrainedConfig):
    r"""
    num_experts (`int`): this is text
    """

    model_type = "one_text"
    num_experts_per_tok: int = 2
    num_experts: int | None = None

class OneConfig(PreTrainedConfig):
    model_type = "one"
    sub_configs_defaults = {
        "vision_config": VisionConfig,
        "text_config": TextConfig,
    }

class TwoConfig(TextConfig):
    model_type = "two"
    def __init__(self, num_experts_per_tok=2):
        super().__init__()

class DenseConfig(PreTrainedConfig):
    model_type = "dense"
    attribute_map = {"num_experts": "nothing"}
    num_experts_per_tok: int = 2

class WrappingConfig(PreTrainedConfig):
    model_type = "wrapping"
    sub_configs_defaults = {
        "text_config": SubConfigSpec(
            config_class=AutoConfig,
            model_type="two",
            init_kwargs={"model_type": "no"},
        ),
    }

class LaterWrappingConfig(WrappingConfig):
    model_type = "later"

class FeedForwardConfig(PreTrainedConfig):
    def __init__(self):
        self.moe_num_experts = 4

class PartsConfig(PreTrainedConfig):
    model_type = "parts"
    sub_configs = {"attn_config": DenseConfig, "ffn_config": FeedForwardConfig}

def function():
    num_experts = 1
"#;

    #[test]
    fn language_models_are_found_in_their_wrappers() {
        let mut configurations = Configurations::default();
        configurations.add(SOURCE);
        let classes = BTreeMap::from([("two".to_owned(), "TwoConfig".to_owned())]);
        let of = |model_type: &str, class: &str| {
            configurations.language_model(model_type, class, &classes)
        };
        for (model_type, class, expected) in [
            ("one", "OneConfig", ("one_text", true)),
            ("one_text", "TextConfig", ("one_text", true)),
            ("two", "TwoConfig", ("two", true)),
            ("dense", "DenseConfig", ("dense", false)),
            ("wrapping", "WrappingConfig", ("two", true)),
            ("later", "LaterWrappingConfig", ("two", true)),
            ("parts", "PartsConfig", ("parts", true)),
        ] {
            let (name, experts) = of(model_type, class).unwrap();
            assert_eq!((name.as_str(), experts), expected, "{model_type}");
        }
        assert_eq!(of("three", "ThreeConfig"), None);
    }
}
