//! Checks requests by the table.

use std::fmt::Write as _;

use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};

use super::{Form, Kind, Rule, Tagged, Variant};
use crate::request::Refusal;

/// Place of a value in a request.
#[derive(Clone, Copy)]
enum Place<'a> {
    Root,
    Field(&'a Place<'a>, &'a str),
    Item(&'a Place<'a>, usize),
}

impl Place<'_> {
    /// Returns the place as in `messages[1].content`.
    fn path(&self) -> String {
        match self {
            Place::Root => String::new(),
            Place::Field(Place::Root, name) => (*name).to_owned(),
            Place::Field(of, name) => format!("{}.{name}", of.path()),
            Place::Item(of, index) => format!("{}[{index}]", of.path()),
        }
    }

    fn refuse(&self, why: &str) -> Refusal {
        let path = self.path();
        let message = match path.as_str() {
            "" => format!("the body {why}"),
            path => format!("{path} {why}"),
        };
        Refusal { message, param: (!path.is_empty()).then(|| path.into()), code: None }
    }
}

impl Form {
    /// Checks a request and reads it. Fields without effect are left out, other names are replaced, and numbers have the type that
    /// is needed.
    ///
    /// # Errors
    /// Returns an error that names the field which is missing, unknown, of the wrong kind, or cannot be followed.
    pub fn read<T: DeserializeOwned>(&self, body: Value) -> Result<T, Refusal> {
        let body = self.checked(body)?;
        serde_json::from_value(body).map_err(|error| Refusal {
            message: format!("the body is not a request: {error}"),
            param: None,
            code: None,
        })
    }

    /// Checks a request, and returns it in the form that the server reads.
    ///
    /// # Errors
    /// Returns the errors of [`Form::read`].
    pub fn checked(&self, body: Value) -> Result<Value, Refusal> {
        match body {
            Value::Object(fields) => Ok(object(self, fields, &Place::Root)?.into()),
            _ => Err(Place::Root.refuse("must be a JSON object")),
        }
    }
}

/// Checks the fields of an object.
fn object(
    form: &Form,
    fields: Map<String, Value>,
    place: &Place<'_>,
) -> Result<Map<String, Value>, Refusal> {
    let mut checked = Map::new();
    for (name, value) in fields {
        let own = Place::Field(place, &name);
        let Some(field) = form.field(&name) else {
            return Err(own.refuse("is not a field that this server knows"));
        };
        if value.is_null() {
            continue;
        }
        let name = match field.rule {
            Rule::Harmless(_) => continue,
            Rule::Refused { off, why } => {
                if asks(&value, off) {
                    return Err(own.refuse(&format!("is not supported: {why}")));
                }
                continue;
            }
            Rule::Honoured | Rule::Required => field.name,
            Rule::Alias(of) => of,
        };
        let Some(value) = read(&field.kind, value, &own)? else { continue };
        match checked.get(name) {
            Some(other) if *other != value => {
                return Err(own.refuse(&format!("and {name} exclude each other")));
            }
            _ => checked.insert(name.to_owned(), value),
        };
    }
    let missing = |field: &&super::Field| {
        matches!(field.rule, Rule::Required) && !checked.contains_key(field.name)
    };
    match form.fields().find(missing) {
        Some(field) => Err(Place::Field(place, field.name).refuse("is missing")),
        None => Ok(checked),
    }
}

/// Returns true if the value of a field that cannot be followed asks for something.
fn asks(value: &Value, off: &[&str]) -> bool {
    let is_nothing = match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    };
    let is = |text: &&str| {
        let of: Value = serde_json::from_str(text).unwrap_or_default();
        of == *value || of.is_number() && of.as_f64() == value.as_f64()
    };
    // A value of the table that is off takes the place of nothing: `false` asks for something where `true` is usual, and 0 where
    // another number is.
    let is_flag = |text: &&str| matches!(*text, "true" | "false");
    let is_number = |text: &&str| text.parse::<f64>().is_ok();
    let has_other = match value {
        Value::Bool(_) => off.iter().any(is_flag),
        Value::Number(_) => off.iter().any(is_number),
        _ => false,
    };
    !(off.iter().any(is) || is_nothing && !has_other)
}

/// Reads a value. Returns `None` if it is the same as no value.
fn read(kind: &Kind, value: Value, place: &Place<'_>) -> Result<Option<Value>, Refusal> {
    let wrong = || Err(place.refuse(&format!("must be {}", kind.words())));
    let number = |of: Option<i64>| Ok(of.map(Value::from));
    let value = match (kind, value) {
        (Kind::Any, value) => value,
        (Kind::Flag, value @ Value::Bool(_)) | (Kind::Text, value @ Value::String(_)) => value,
        (Kind::Number, Value::Number(number)) if is_finite(&number) => number.into(),
        (Kind::Integer, Value::Number(number)) => match integer(&number) {
            Some(number) => number.into(),
            // Seeds of 64 bits.
            None if number.is_u64() => (number.as_u64().unwrap_or_default() as i64).into(),
            None => return wrong(),
        },
        (Kind::Natural | Kind::Limit | Kind::Count, Value::Number(given)) => {
            match (kind, integer(&given)) {
                (_, Some(of @ 0..)) => return number(Some(of)),
                (Kind::Limit, Some(_)) => return number(None),
                (Kind::Count, Some(_)) => return number(Some(0)),
                _ => return wrong(),
            }
        }
        (Kind::Word(words), Value::String(text)) => {
            match words.iter().find(|word| word.eq_ignore_ascii_case(text.trim())) {
                Some(word) => (*word).into(),
                None => return wrong(),
            }
        }
        (Kind::List(of), Value::Array(items)) => {
            let mut checked = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                checked.extend(read(of, item, &Place::Item(place, index))?);
            }
            checked.into()
        }
        (Kind::Object(form), Value::Object(fields)) => object(form, fields, place)?.into(),
        (Kind::Map(of), Value::Object(fields)) => {
            let mut checked = Map::new();
            for (name, value) in fields {
                if let Some(value) = read(of, value, &Place::Field(place, &name))? {
                    checked.insert(name, value);
                }
            }
            checked.into()
        }
        (Kind::Tagged(of), Value::Object(fields)) => return tagged(of, fields, place),
        (Kind::OneOf(kinds), value) => match kinds.iter().find(|kind| fits(kind, &value)) {
            Some(kind) => return read(kind, value, place),
            None => return wrong(),
        },
        _ => return wrong(),
    };
    Ok(Some(value))
}

/// Reads an object whose form depends on a field. Returns `None` if it is left out.
fn tagged(
    of: &Tagged,
    mut fields: Map<String, Value>,
    place: &Place<'_>,
) -> Result<Option<Value>, Refusal> {
    let own = Place::Field(place, of.tag);
    let tag = match (fields.get(of.tag), of.default) {
        (Some(Value::String(tag)), _) => tag.clone(),
        (None | Some(Value::Null), Some(tag)) => tag.to_owned(),
        (None | Some(Value::Null), None) => return Err(own.refuse("is missing")),
        (Some(_), _) => return Err(own.refuse("must be a text")),
    };
    let known = of.variants.iter().find(|(name, _)| *name == tag);
    match known.map_or(of.others, |(_, variant)| *variant) {
        Variant::Form(form) => {
            fields.remove(of.tag);
            let mut checked = object(form, fields, place)?;
            checked.insert(of.tag.to_owned(), tag.into());
            Ok(Some(checked.into()))
        }
        Variant::LeftOut(_) => Ok(None),
        Variant::Refused(why) => Err(own.refuse(&format!("{tag:?} is not supported: {why}"))),
    }
}

fn is_finite(number: &Number) -> bool {
    number.as_f64().is_some_and(f64::is_finite)
}

/// Returns a whole number, also of a number such as 2.0.
fn integer(number: &Number) -> Option<i64> {
    const EXACT_MAX: f64 = (1_u64 << 53) as f64;
    number.as_i64().or_else(|| {
        let float = number.as_f64()?;
        (float.fract() == 0.0 && float.abs() <= EXACT_MAX).then_some(float as i64)
    })
}

/// Returns true if a value has the JSON type of a kind. A list is judged by its first item.
fn fits(kind: &Kind, value: &Value) -> bool {
    match kind {
        Kind::Any => true,
        Kind::Flag => value.is_boolean(),
        Kind::Text | Kind::Word(_) => value.is_string(),
        Kind::Number | Kind::Integer | Kind::Natural | Kind::Limit | Kind::Count => {
            value.is_number()
        }
        Kind::List(of) => {
            value.as_array().is_some_and(|list| list.first().is_none_or(|item| fits(of, item)))
        }
        Kind::Object(_) | Kind::Tagged(_) | Kind::Map(_) => value.is_object(),
        Kind::OneOf(kinds) => kinds.iter().any(|kind| fits(kind, value)),
    }
}

impl Kind {
    /// Says in words what a field may hold.
    pub fn words(&self) -> String {
        match self {
            Kind::Any => "any value".to_owned(),
            Kind::Flag => "true or false".to_owned(),
            Kind::Text => "a text".to_owned(),
            Kind::Number => "a number".to_owned(),
            Kind::Integer => "a whole number".to_owned(),
            Kind::Natural => "a whole number from 0 on".to_owned(),
            Kind::Limit => "a whole number from 0 on, or a negative one for no limit".to_owned(),
            Kind::Count => "a whole number from 0 on, or a negative one for 0".to_owned(),
            Kind::Word(words) => joined(words.iter().map(|word| format!("{word:?}"))),
            Kind::List(of) => format!("a list, each item {}", of.words()),
            Kind::Object(_) | Kind::Tagged(_) | Kind::Map(_) => "an object".to_owned(),
            Kind::OneOf(kinds) => joined(kinds.iter().map(Kind::words)),
        }
    }
}

/// Joins words by commas and an `or`.
fn joined(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    let mut text = String::new();
    for (index, word) in words.iter().enumerate() {
        let between = match index {
            0 => "",
            _ if index + 1 == words.len() => " or ",
            _ => ", ",
        };
        let _ = write!(text, "{between}{word}");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_that_asks_for_nothing_is_told_from_others() {
        for (value, off, is_asking) in [
            (json!(0), &[][..], false),
            (json!(0), &["true"][..], false),
            (json!(0), &["-1"][..], true),
            (json!(0.0), &["-1", "0"][..], false),
            (json!(-1.0), &["-1"][..], false),
            (json!(false), &["-1"][..], false),
            (json!(false), &["true"][..], true),
            (json!(true), &["true"][..], false),
            (json!(""), &["-1"][..], false),
            (json!([]), &["true"][..], false),
            (json!({}), &[][..], false),
            (json!("x"), &[][..], true),
        ] {
            assert_eq!(asks(&value, off), is_asking, "{value} {off:?}");
        }
    }
}
