//! The OpenAPI document of the server.
//!
//! Schemas of requests come from the table of fields by which they are read. `routes.rs` lists the routes, and a test compares it
//! with the router's own.

mod build;
mod routes;
mod schemas;

use axum::Json;
use forebay_requests::fields;
use serde_json::{Value, json};

/// `GET /openapi.json`.
pub async fn document() -> Json<Value> {
    Json(whole())
}

/// Returns the document with the schemas of the table of fields.
fn whole() -> Value {
    let mut document = json!(routes::document());
    if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
        schemas.extend(fields::schemas());
    }
    document
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns all references of a document.
    fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_route_is_documented_and_nothing_else() {
        let document = whole();
        let mut routed = BTreeSet::new();
        for (path, methods) in crate::server::routes().list() {
            assert!(!methods.is_empty(), "{path}");
            let path = path.replace("{*", "{");
            routed.extend(methods.iter().map(|method| format!("{method} {path}")));
        }
        let mut documented = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                documented.insert(format!("{} {path}", method.to_uppercase()));
                // Each part of the path is a parameter.
                let parameters = operation["parameters"].as_array().into_iter().flatten();
                let named: BTreeSet<&str> = parameters
                    .filter(|parameter| parameter["in"] == "path")
                    .filter_map(|parameter| parameter["name"].as_str())
                    .collect();
                let parts: BTreeSet<&str> = path
                    .split('/')
                    .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
                    .collect();
                assert_eq!(named, parts, "{method} {path}");
                assert!(operation["summary"].is_string() && operation["tags"].is_array());
                assert!(
                    operation["responses"]["200"].is_object()
                        || operation["responses"]["501"].is_object()
                );
            }
        }
        assert!(routed.len() > 30);
        assert_eq!(routed, documented);
    }

    #[test]
    fn references_name_schemas_with_fields() {
        let document = whole();
        assert_eq!(document["openapi"], "3.1.0");
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 10, "{found:?}");
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        let schemas = &document["components"]["schemas"];
        for (name, field) in [
            ("ChatRequest", "messages"),
            ("AnthropicRequest", "max_tokens"),
            ("OllamaChatRequest", "keep_alive"),
            ("ResponsesRequest", "previous_response_id"),
            ("InfillRequest", "input_prefix"),
            ("EmbeddingsRequest", "encoding_format"),
        ] {
            assert!(schemas[name]["properties"][field].is_object(), "{name}: {}", schemas[name]);
        }
        // What a request must have is what reading it needs.
        assert_eq!(schemas["InfillRequest"]["required"], json!(["input_prefix", "input_suffix"]));
    }
}
