//! `[response]`: which fields and bodies clients receive.

use crate::{
    config::{
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
    },
    response::{BodyStyle, FieldFamilies, FieldsOn, ResponseSettings},
    route::path,
};

/// The default path of the page on which callers see their own quotas.
const STATUS_PATH: &str = "/.well-known/ratelimit";

/// Compiles the settings, and the path of the quota status page if it is on.
pub(super) fn compile(file: &Section<'_>) -> (ResponseSettings, Option<String>) {
    let section = file.table("response", &keys::RESPONSE);
    let on = section.choice(
        "on",
        &[
            ("always", FieldsOn::Always),
            ("rejected", FieldsOn::Rejected),
        ],
    );
    let body = section.choice(
        "body",
        &[
            ("problem_json", BodyStyle::ProblemJson),
            ("json", BodyStyle::Json),
            ("text", BodyStyle::Text),
        ],
    );
    let fields = match section.texts("fields") {
        Some(written) => families(&written),
        None => FieldFamilies {
            ratelimit: true,
            ratelimit_triple: false,
            x_ratelimit: true,
            ..FieldFamilies::default()
        },
    };
    let status_path = match section.get("status_path") {
        Some(value) => value.text().and_then(|text| status_path(&text)),
        None => Some(STATUS_PATH.to_owned()),
    };
    let sdk = section.boolean("sdk");
    section.finish();
    let settings = ResponseSettings {
        fields,
        on: on.unwrap_or_default(),
        body: body.unwrap_or_default(),
        sdk,
    };
    (settings, status_path)
}

/// Reads a path in its normal form. An empty one turns the page off.
fn status_path(text: &ExpandedText<'_>) -> Option<String> {
    if text.value.is_empty() {
        return None;
    }
    text.parse("a path", |value| {
        let problem = |hint: String| {
            let message = format!("{} is not a path that a request can have", quote(value));
            Err(PendingDiagnostic::new(Code::RouteConflict, message).hint(hint))
        };
        let example = format!("write one path without parameters, for example \"{STATUS_PATH}\"");
        if value.contains(['{', '*', '?', '#']) {
            return problem(example);
        }
        match path::normalise(value) {
            Ok(normal) if normal.key == value => Ok(value.to_owned()),
            Ok(normal) => problem(format!("write {}", quote(&normal.key))),
            Err(_) => problem(example),
        }
    })
}

#[derive(Clone, Copy)]
enum FieldFamily {
    RateLimit,
    Triple,
    XRateLimit,
    OpenAi,
    Anthropic,
}

fn families(written: &[ExpandedText<'_>]) -> FieldFamilies {
    let mut fields = FieldFamilies::default();
    for text in written {
        let family = text.choice(
            &[
                ("ratelimit", FieldFamily::RateLimit),
                ("ratelimit_triple", FieldFamily::Triple),
                ("x_ratelimit", FieldFamily::XRateLimit),
                ("openai", FieldFamily::OpenAi),
                ("anthropic", FieldFamily::Anthropic),
            ],
            &[],
            "",
        );
        match family {
            Some(FieldFamily::RateLimit) => fields.ratelimit = true,
            Some(FieldFamily::Triple) => fields.ratelimit_triple = true,
            Some(FieldFamily::XRateLimit) => fields.x_ratelimit = true,
            Some(FieldFamily::OpenAi) => fields.openai = true,
            Some(FieldFamily::Anthropic) => fields.anthropic = true,
            None => {}
        }
        let ours = matches!(family, Some(FieldFamily::RateLimit | FieldFamily::Triple));
        if ours && fields.ratelimit && fields.ratelimit_triple {
            let message = "\"ratelimit\" and \"ratelimit_triple\" contradict each other";
            let hint = "both send RateLimit fields, with different meanings: keep one";
            text.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
        }
    }
    fields
}
