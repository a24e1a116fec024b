//! Routes that are listed as they are added, so that the OpenAPI document can be compared with them.

use std::sync::Arc;

use axum::Router;
use axum::routing::MethodRouter;

use crate::app::App;

/// Routes of the server.
#[derive(Default)]
pub struct Routes {
    router: Router<Arc<App>>,
    /// Every path with the description of its methods.
    listed: Vec<(&'static str, String)>,
}

impl Routes {
    pub fn new() -> Routes {
        Routes::default()
    }

    /// Adds the methods of a path.
    pub fn route(mut self, path: &'static str, methods: MethodRouter<Arc<App>>) -> Routes {
        self.listed.push((path, format!("{methods:?}")));
        self.router = self.router.route(path, methods);
        self
    }

    pub fn into_router(self) -> Router<Arc<App>> {
        self.router
    }

    /// Returns every path with its methods.
    ///
    /// # Panics
    /// Panics if axum no longer describes the methods of a route by the header `Allow`.
    #[cfg(test)]
    pub fn list(&self) -> Vec<(&'static str, Vec<String>)> {
        let methods = |(path, described): &(&'static str, String)| {
            let (_, rest) = described.split_once("allow_header: Bytes(b\"").expect("axum says it");
            let (allowed, _) = rest.split_once('"').expect("the text ends");
            // Every GET also answers HEAD.
            let allowed = allowed.split(',').filter(|method| *method != "HEAD");
            (*path, allowed.map(str::to_owned).collect())
        };
        self.listed.iter().map(methods).collect()
    }
}
