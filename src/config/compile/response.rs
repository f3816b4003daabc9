//! `[response]`: what clients are told.

use crate::{
    config::{code::Code, diagnostic::Problem, file::Section, keys, value::Text},
    response::{BodyStyle, FieldFamilies, FieldsOn, Settings},
};

pub(super) fn compile(file: &Section<'_>) -> Settings {
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
        },
    };
    section.finish();
    Settings {
        fields,
        on: on.unwrap_or_default(),
        body: body.unwrap_or_default(),
    }
}

#[derive(Clone, Copy)]
enum Family {
    RateLimit,
    Triple,
    XRateLimit,
}

fn families(written: &[Text<'_>]) -> FieldFamilies {
    let mut fields = FieldFamilies::default();
    for text in written {
        let family = text.choice(
            &[
                ("ratelimit", Family::RateLimit),
                ("ratelimit_triple", Family::Triple),
                ("x_ratelimit", Family::XRateLimit),
            ],
            &[],
            "",
        );
        match family {
            Some(Family::RateLimit) => fields.ratelimit = true,
            Some(Family::Triple) => fields.ratelimit_triple = true,
            Some(Family::XRateLimit) => fields.x_ratelimit = true,
            None => {}
        }
        let ours = matches!(family, Some(Family::RateLimit | Family::Triple));
        if ours && fields.ratelimit && fields.ratelimit_triple {
            let message = "\"ratelimit\" and \"ratelimit_triple\" contradict each other";
            let hint = "both give RateLimit fields a meaning of their own, and clients could not tell which: keep one";
            text.error(Problem::new(Code::Contradiction, message).hint(hint));
        }
    }
    fields
}
