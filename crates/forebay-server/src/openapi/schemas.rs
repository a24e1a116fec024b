//! Schemas that are not in the table of fields: errors and uploads.

use std::collections::BTreeMap;

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};

use super::build::text;

pub const OPENAI_ERROR: &str = "OpenAiError";
pub const ANTHROPIC_ERROR: &str = "AnthropicError";
pub const OLLAMA_ERROR: &str = "OllamaError";

/// Adds the schemas of errors.
pub fn add_errors(schemas: &mut BTreeMap<String, RefOr<Schema>>) {
    let nullable = || {
        let kinds = [Type::String, Type::Null].into_iter().collect::<SchemaType>();
        ObjectBuilder::new().schema_type(kinds)
    };
    let openai = ObjectBuilder::new()
        .property("message", text())
        .property("type", text())
        .property("param", nullable())
        .property("code", nullable())
        .required("message")
        .required("type");
    let anthropic = ObjectBuilder::new()
        .property("type", text())
        .property("message", text())
        .required("type")
        .required("message");
    let of = |error: RefOr<Schema>| ObjectBuilder::new().property("error", error).required("error");
    schemas.insert(OPENAI_ERROR.into(), of(openai.into()).into());
    schemas.insert(ANTHROPIC_ERROR.into(), of(anthropic.into()).property("type", text()).into());
    schemas.insert(OLLAMA_ERROR.into(), of(text()).into());
}

/// Returns the schema of an upload.
pub fn upload() -> RefOr<Schema> {
    let number = ObjectBuilder::new().schema_type(SchemaType::new(Type::Integer));
    let purpose = ObjectBuilder::new().schema_type(SchemaType::new(Type::String));
    ObjectBuilder::new()
        .property("purpose", purpose.description(Some("batch")))
        .property("file", ObjectBuilder::new().schema_type(SchemaType::new(Type::String)))
        .property("expires_after[anchor]", text())
        .property("expires_after[seconds]", number)
        .required("purpose")
        .required("file")
        .into()
}
