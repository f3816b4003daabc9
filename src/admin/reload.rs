//! `POST /api/v1/reload`: asks whoever owns the workers, and says what came of it.

use http::StatusCode;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};

use super::api::Answer;
use crate::config::{Changes, Report};

/// Somebody wants the configuration to be read again.
#[derive(Debug)]
pub struct Reload {
    /// Who or what, for the log.
    pub why: String,
    /// Where to say what came of it.
    pub answer: oneshot::Sender<Result<Reloaded, Report>>,
}

/// A configuration that runs now.
#[derive(Clone, Debug)]
pub struct Reloaded {
    /// Its hash.
    pub hash: String,
    /// What is different.
    pub changes: Changes,
    /// What looks wrong with it all the same.
    pub warnings: Report,
}

/// Asks for a reload, and waits for it.
pub(super) async fn reload(asked: &mpsc::Sender<Reload>, why: String) -> Answer {
    let (answer, told) = oneshot::channel();
    if asked.send(Reload { why, answer }).await.is_err() {
        return Answer::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "this gateway is about to end",
        );
    }
    match told.await {
        Ok(Ok(reloaded)) => {
            let mut json = reloaded.warnings.json();
            json["ok"] = json!(true);
            json["hash"] = json!(reloaded.hash);
            json["summary"] = json!(reloaded.changes.to_string());
            json["changes"] = reloaded.changes.json();
            Answer::new(StatusCode::OK, json)
        }
        Ok(Err(report)) => {
            let mut json = report.json();
            json["ok"] = json!(false);
            json["summary"] = json!(format!(
                "{}; the configuration that ran before still runs",
                report.summary()
            ));
            Answer::new(StatusCode::UNPROCESSABLE_ENTITY, json)
        }
        Err(_) => Answer::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "this gateway is about to end",
        ),
    }
}
