//! Lists in pages, as OpenAI's interface has them.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::Failure;

/// The query of a list.
#[derive(Deserialize, Default)]
#[serde(default)]
pub struct Query {
    /// Id after which the page begins.
    after: Option<String>,
    limit: Option<usize>,
    order: Option<String>,
    pub purpose: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Query, Failure> {
        let query = axum::extract::Query::try_from_uri(&parts.uri);
        let query = query.map_err(|error| ApiError::bad(error.body_text()))?;
        Ok(query.0)
    }
}

impl Query {
    /// Returns a page of `items`, each an id and an object, which begin with the newest. A page has `usual` items unless the
    /// query says otherwise, and `most` at most.
    ///
    /// # Errors
    /// Returns an error if the limit or the order is wrong, or if there is no item `after`.
    pub fn page(
        &self,
        mut items: Vec<(String, Value)>,
        usual: usize,
        most: usize,
    ) -> Result<Value, ApiError> {
        let wrong = |param: &'static str, why: String| {
            Err(ApiError { param: Some(param.into()), ..ApiError::bad(why) })
        };
        let limit = self.limit.unwrap_or(usual);
        if !(1..=most).contains(&limit) {
            return wrong("limit", format!("limit must be between 1 and {most}"));
        }
        match self.order.as_deref() {
            None | Some("desc") => {}
            Some("asc") => items.reverse(),
            Some(_) => return wrong("order", "order must be asc or desc".to_owned()),
        }
        if let Some(after) = &self.after {
            let Some(at) = items.iter().position(|(id, _)| id == after) else {
                let why = format!("the list has no {after:?}");
                let error = ApiError::new(StatusCode::BAD_REQUEST, why);
                return Err(ApiError { param: Some("after".into()), ..error });
            };
            items.drain(..=at);
        }
        let has_more = items.len() > limit;
        items.truncate(limit);
        let id = |item: Option<&(String, Value)>| item.map(|(id, _)| id.clone());
        let (first, last) = (id(items.first()), id(items.last()));
        let data: Vec<Value> = items.into_iter().map(|(_, object)| object).collect();
        Ok(json!({
            "object": "list",
            "data": data,
            "first_id": first,
            "last_id": last,
            "has_more": has_more,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other() {
        let items: Vec<(String, Value)> =
            ["c", "b", "a"].iter().map(|id| ((*id).to_owned(), json!(id))).collect();
        let query = |after: Option<&str>, order: &str, limit| {
            let (after, order) = (after.map(str::to_owned), Some(order.to_owned()));
            Query { after, order, limit: Some(limit), purpose: None }.page(items.clone(), 2, 5)
        };
        let page = query(None, "desc", 2).unwrap();
        assert_eq!((&page["data"], &page["has_more"]), (&json!(["c", "b"]), &json!(true)));
        assert_eq!((&page["first_id"], &page["last_id"]), (&json!("c"), &json!("b")));
        let page = query(Some("b"), "desc", 2).unwrap();
        assert_eq!((&page["data"], &page["has_more"]), (&json!(["a"]), &json!(false)));
        assert_eq!(query(Some("a"), "asc", 5).unwrap()["data"], json!(["b", "c"]));
        assert_eq!(query(Some("a"), "desc", 5).unwrap()["last_id"], Value::Null);
        for (after, order, limit) in [(Some("x"), "asc", 1), (None, "x", 1), (None, "asc", 0)] {
            assert!(query(after, order, limit).is_err());
        }
        assert!(query(None, "asc", 6).is_err());
    }
}
