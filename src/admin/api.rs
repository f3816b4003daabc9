//! `/api/v1/…`: the JSON API of a running gateway, for programs and the command line.
//!
//! **Access.** The rules of [`AdminPages`] apply to every request: the token if one is configured,
//! and a loopback `Host` on a loopback address. A request that changes state must also not come
//! from a web page. Its body, if any, must be `application/json`, which a page cannot send
//! cross-origin without a preflight (Fetch §4.8). Requests that a browser marks as cross-site are
//! refused. Every change is logged with the client's address.

use std::net::IpAddr;

use bytes::Bytes;
use http::{Method, Request};
use http_body::Body;
use serde_json::json;

use super::{
    api_request::{self, ApiRequest},
    api_response::ApiResponse,
    connections::AdminConnection,
    pages::AdminPages,
    reload,
};

/// Whether the API serves this path.
pub(super) fn is_for(path: &str) -> bool {
    path.starts_with("/api/")
}

impl AdminPages {
    /// Answers a request that has passed the access checks.
    pub(super) async fn call<B>(
        &self,
        request: Request<B>,
        from: IpAddr,
        connection: &AdminConnection,
    ) -> ApiResponse
    where
        B: Body<Data = Bytes>,
    {
        let (head, body) = request.into_parts();
        let call = match api_request::read(&head, body, from, connection).await {
            Ok(call) => call,
            Err(answer) => return answer,
        };
        if matches!(call.path.as_slice(), [path] if path == "reload") {
            return match connection.work(&self.inner.connections.reloads) {
                Some(_permit) => self.reload(&call).await,
                None => ApiResponse::busy(),
            };
        }
        let admin = self.clone();
        let performed = connection.in_turn(move || admin.perform(&call)).await;
        performed.unwrap_or_else(ApiResponse::failed)
    }

    async fn reload(&self, call: &ApiRequest) -> ApiResponse {
        if call.method != Method::POST {
            return ApiResponse::wrong_method("POST");
        }
        match call.takes(&[]) {
            Ok(()) => {
                let why = format!("requested by {}", call.from);
                reload::reload(&self.reloads, why).await
            }
            Err(answer) => answer,
        }
    }

    fn perform(&self, call: &ApiRequest) -> ApiResponse {
        let path: Vec<&str> = call.path.iter().map(String::as_str).collect();
        match (path.as_slice(), &call.method) {
            (["config"], &Method::GET | &Method::HEAD) => self.config(),
            (["config"], _) => ApiResponse::wrong_method("GET"),
            (["status"], _) => self.status(call),
            (["limits", rest @ ..], _) => self.limits(rest, call),
            (["kill"], _) => self.kill(call),
            (["decisions", rest @ ..], _) => self.decisions(rest, call),
            (["explain"], _) => self.explain(call),
            _ => ApiResponse::nothing(),
        }
    }
}

impl AdminPages {
    /// The running configuration as written: `${NAME}` unresolved, passwords removed.
    fn config(&self) -> ApiResponse {
        let active = self.inner.current.active();
        let snapshot = active.snapshot();
        let files: Vec<_> = snapshot.written.files.keys().collect();
        ApiResponse::ok(json!({
            "hash": snapshot.hash,
            "version": env!("CARGO_PKG_VERSION"),
            "files": files,
            "config": snapshot.written.redacted(),
        }))
    }
}
