//! `POST /api/v1/reload`: requests a reload from the owner of the workers, and returns the outcome.

use http::StatusCode;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};

use super::api_response::ApiResponse;
use crate::config::{Changes, DiagnosticReport};

/// A request to read the configuration again.
#[derive(Debug)]
pub struct Reload {
    /// Its origin, for the log.
    pub why: String,
    /// Receives the outcome.
    pub answer: oneshot::Sender<Result<Reloaded, DiagnosticReport>>,
}

/// A configuration that is now running.
#[derive(Clone, Debug)]
pub struct Reloaded {
    /// Its hash.
    pub hash: String,
    /// Differences from the previous one.
    pub changes: Changes,
    /// Its warnings.
    pub warnings: DiagnosticReport,
}

/// Requests a reload and waits for its outcome.
pub(super) async fn reload(asked: &mpsc::Sender<Reload>, why: String) -> ApiResponse {
    let (answer, told) = oneshot::channel();
    if asked.send(Reload { why, answer }).await.is_err() {
        return ApiResponse::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "this gateway is shutting down",
        );
    }
    match told.await {
        Ok(Ok(reloaded)) => {
            let mut json = reloaded.warnings.json();
            json["ok"] = json!(true);
            json["hash"] = json!(reloaded.hash);
            json["summary"] = json!(reloaded.changes.to_string());
            json["changes"] = reloaded.changes.json();
            ApiResponse::new(StatusCode::OK, json)
        }
        Ok(Err(report)) => {
            let mut json = report.json();
            json["ok"] = json!(false);
            json["summary"] = json!(format!(
                "{}; the previous configuration still runs",
                report.summary()
            ));
            ApiResponse::new(StatusCode::UNPROCESSABLE_ENTITY, json)
        }
        Err(_) => ApiResponse::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "this gateway is shutting down",
        ),
    }
}
