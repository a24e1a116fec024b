//! The fields that requests may have, and what becomes of each.
//!
//! One table describes every interface. [`Form::read`] checks a request by it: a field is followed, or has no effect on the answer
//! and is left out, or is refused by name. A field that is not in the table is refused, too, so that no request gets an answer to
//! something that it did not ask. The documentation and the schemas of the OpenAPI document come from the same table.

mod anthropic;
mod check;
mod llama_cpp;
mod messages;
mod ollama;
mod openai;
mod page;
mod responses;
mod samplers;
mod schema;

pub use anthropic::ANTHROPIC;
pub use llama_cpp::{APPLY_TEMPLATE, COMPLETION, DETOKENIZE, INFILL, TOKENIZE};
pub use ollama::{OLLAMA_CHAT, OLLAMA_COPY, OLLAMA_EMBED, OLLAMA_GENERATE, OLLAMA_NAME};
pub use openai::{BATCH, CHAT, COMPLETIONS, EMBEDDINGS};
pub use page::page;
pub use responses::RESPONSES;
pub use schema::schemas;

/// An object of a request: the request itself or a part of it.
#[derive(Debug)]
pub struct Form {
    /// Name of the schema in the OpenAPI document.
    pub name: &'static str,
    /// Paths that take this object as their body. Empty for a part of a request.
    pub paths: &'static [&'static str],
    /// The fields, in groups that forms share.
    pub groups: &'static [&'static [Field]],
}

/// A field of an object.
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub rule: Rule,
    /// A value that clients send, as JSON.
    pub example: &'static str,
}

/// What becomes of a field.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// It is followed.
    Honoured,
    /// It is followed, and a request without it is refused.
    Required,
    /// It is another name of this field.
    Alias(&'static str),
    /// It does not change the answer, for this reason.
    Harmless(&'static str),
    /// A request with it is refused for this reason, unless it has one of the values `off`, which ask for nothing. So do `null`,
    /// `false`, 0 and whatever is empty.
    Refused { off: &'static [&'static str], why: &'static str },
}

/// What a field may hold. `null` is the same as no field, everywhere.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Anything. It is checked where it is used.
    Any,
    Flag,
    Text,
    Number,
    /// A whole number, which may be written as 2.0.
    Integer,
    /// A whole number from 0 on.
    Natural,
    /// A whole number from 0 on. A negative one sets no limit, as if the field were not there.
    Limit,
    /// A whole number from 0 on. A negative one is 0.
    Count,
    /// One of these words, in small or capital letters.
    Word(&'static [&'static str]),
    List(&'static Kind),
    Object(&'static Form),
    /// An object whose form depends on one of its fields.
    Tagged(&'static Tagged),
    /// The first of these that fits.
    OneOf(&'static [Kind]),
    /// An object with any names, whose values are of this kind.
    Map(&'static Kind),
}

/// Objects that have their form by the text of a field.
#[derive(Debug)]
pub struct Tagged {
    /// Name of the schema in the OpenAPI document.
    pub name: &'static str,
    /// Name of that field.
    pub tag: &'static str,
    /// The text of an object without that field, if it may be missing.
    pub default: Option<&'static str>,
    pub variants: &'static [(&'static str, Variant)],
    /// What becomes of objects with another text.
    pub others: Variant,
}

/// What becomes of an object with a certain tag.
#[derive(Debug, Clone, Copy)]
pub enum Variant {
    /// It is followed.
    Form(&'static Form),
    /// It is left out of its list, for this reason.
    LeftOut(&'static str),
    /// A request with it is refused, for this reason.
    Refused(&'static str),
}

const fn honoured(name: &'static str, kind: Kind, example: &'static str) -> Field {
    Field { name, kind, rule: Rule::Honoured, example }
}

const fn required(name: &'static str, kind: Kind, example: &'static str) -> Field {
    Field { name, kind, rule: Rule::Required, example }
}

const fn alias(name: &'static str, of: &'static str, kind: Kind, example: &'static str) -> Field {
    Field { name, kind, rule: Rule::Alias(of), example }
}

const fn harmless(name: &'static str, example: &'static str, why: &'static str) -> Field {
    Field { name, kind: Kind::Any, rule: Rule::Harmless(why), example }
}

const fn refused(name: &'static str, example: &'static str, why: &'static str) -> Field {
    refused_unless(name, &[], example, why)
}

const fn refused_unless(
    name: &'static str,
    off: &'static [&'static str],
    example: &'static str,
    why: &'static str,
) -> Field {
    Field { name, kind: Kind::Any, rule: Rule::Refused { off, why }, example }
}

/// A text or a list of texts.
const TEXTS: Kind = Kind::OneOf(&[Kind::Text, Kind::List(&Kind::Text)]);
/// Token ids.
const IDS: Kind = Kind::List(&Kind::Natural);

impl Form {
    /// Returns all fields.
    pub fn fields(&self) -> impl Iterator<Item = &'static Field> {
        self.groups.iter().flat_map(|group| group.iter())
    }

    /// Returns the field of this name.
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields().find(|field| field.name == name)
    }
}

/// The forms of all bodies.
pub static FORMS: [&Form; 16] = [
    &CHAT,
    &COMPLETIONS,
    &RESPONSES,
    &EMBEDDINGS,
    &BATCH,
    &ANTHROPIC,
    &OLLAMA_CHAT,
    &OLLAMA_GENERATE,
    &OLLAMA_EMBED,
    &OLLAMA_NAME,
    &OLLAMA_COPY,
    &COMPLETION,
    &INFILL,
    &TOKENIZE,
    &DETOKENIZE,
    &APPLY_TEMPLATE,
];
