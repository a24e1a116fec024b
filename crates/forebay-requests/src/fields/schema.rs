//! Schemas of requests for the OpenAPI document.

use serde_json::{Map, Value, json};

use super::{FORMS, Form, Kind, Rule, Tagged, Variant};

/// Returns the schemas of all bodies and their parts, by name. Refused fields are not in them.
pub fn schemas() -> Map<String, Value> {
    let mut all = Map::new();
    for form in FORMS {
        add(form, &mut all);
    }
    all
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// Adds the schema of an object, and returns a reference to it.
fn add(form: &'static Form, all: &mut Map<String, Value>) -> Value {
    if !all.contains_key(form.name) {
        // Objects may hold each other.
        all.insert(form.name.to_owned(), Value::Null);
        let schema = object(form, None, all);
        all.insert(form.name.to_owned(), schema);
    }
    reference(form.name)
}

/// Returns the schema of an object, which has this tag.
fn object(
    form: &'static Form,
    tag: Option<(&str, &str, bool)>,
    all: &mut Map<String, Value>,
) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    if let Some((name, value, is_required)) = tag {
        properties.insert(name.to_owned(), json!({ "type": "string", "const": value }));
        required.extend(is_required.then(|| name.to_owned()));
    }
    for field in form.fields() {
        let mut schema = match field.rule {
            Rule::Refused { .. } => continue,
            _ => schema(&field.kind, all),
        };
        match field.rule {
            Rule::Required => required.push(field.name.to_owned()),
            Rule::Alias(of) => {
                schema = json!({ "allOf": [schema], "description": format!("the same as {of}") });
            }
            Rule::Harmless(why) => {
                schema = json!({ "description": format!("has no effect: {why}") });
            }
            _ => {}
        }
        if !matches!(field.rule, Rule::Required | Rule::Harmless(_)) && field.kind.has_type() {
            schema = json!({ "anyOf": [schema, { "type": "null" }] });
        }
        properties.insert(field.name.to_owned(), schema);
    }
    let mut schema = json!({
        "type": "object",
        "properties": properties,
        "additionalProperties": false,
    });
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema
}

fn schema(kind: &'static Kind, all: &mut Map<String, Value>) -> Value {
    match kind {
        Kind::Any => json!({}),
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Text => json!({ "type": "string" }),
        Kind::Number => json!({ "type": "number" }),
        Kind::Integer | Kind::Limit | Kind::Count => json!({ "type": "integer" }),
        Kind::Natural => json!({ "type": "integer", "minimum": 0 }),
        Kind::Word(words) => json!({ "type": "string", "enum": words }),
        Kind::List(of) => json!({ "type": "array", "items": schema(of, all) }),
        Kind::Map(of) => json!({ "type": "object", "additionalProperties": schema(of, all) }),
        Kind::Object(form) => add(form, all),
        Kind::Tagged(of) => add_tagged(of, all),
        Kind::OneOf(kinds) => {
            json!({ "anyOf": kinds.iter().map(|kind| schema(kind, all)).collect::<Value>() })
        }
    }
}

/// Adds the schema of objects of several forms. Those that are left out may be anything.
fn add_tagged(of: &'static Tagged, all: &mut Map<String, Value>) -> Value {
    if !all.contains_key(of.name) {
        all.insert(of.name.to_owned(), Value::Null);
        let (mut forms, mut known) = (Vec::new(), Vec::new());
        for (tag, variant) in of.variants {
            known.push(*tag);
            match variant {
                Variant::Form(form) => {
                    let is_required = of.default != Some(tag);
                    forms.push(object(form, Some((of.tag, tag, is_required)), all));
                }
                Variant::LeftOut(why) => forms.push(left_out(of.tag, json!({ "const": tag }), why)),
                Variant::Refused(_) => {}
            }
        }
        if let Variant::LeftOut(why) = of.others {
            forms.push(left_out(of.tag, json!({ "not": { "enum": known } }), why));
        }
        all.insert(of.name.to_owned(), json!({ "anyOf": forms }));
    }
    reference(of.name)
}

fn left_out(tag: &str, value: Value, why: &str) -> Value {
    json!({
        "type": "object",
        "description": format!("left out: {why}"),
        "properties": { tag: value },
        "required": [tag],
    })
}

impl Kind {
    /// Returns true if the field does not take just any value.
    fn has_type(&self) -> bool {
        !matches!(self, Kind::Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_name_what_must_be_there_and_nothing_that_is_refused() {
        let all = schemas();
        assert_eq!(all["ChatRequest"]["required"], json!(["messages"]));
        assert_eq!(all["InfillRequest"]["required"], json!(["input_prefix", "input_suffix"]));
        assert!(all["ChatRequest"]["properties"]["chat_template"].is_null());
        assert!(all.values().all(|schema| !schema.is_null()));
        assert_eq!(all["ResponsesItem"]["anyOf"][0]["properties"]["type"]["const"], "message");
    }
}
