//! `[overload]`: the bound on requests in flight, and which priorities are shed first.

use crate::{
    config::{
        code::Code, diagnostic::PendingDiagnostic, keys, section::Section, value::ConfigValue,
    },
    overload::{InFlightBound, OverloadSettings, Priority},
};

/// The priorities of routes; the first is the default.
pub(super) const PRIORITIES: &[(&str, Priority)] = &[
    ("normal", Priority::Normal),
    ("critical", Priority::Critical),
    ("low", Priority::Low),
];

/// Compiles the settings. `None` if load shedding is off.
pub(super) fn compile(file: &Section<'_>) -> Option<OverloadSettings> {
    let section = file.table("overload", &keys::OVERLOAD);
    let there = section.is_there();
    let bound = match section.get("max_in_flight") {
        Some(value) => bound(&value),
        None => Some(InFlightBound::Adaptive),
    };
    let floor = section.get("floor");
    if let (Some(floor), Some(InFlightBound::Fixed(_)) | None) = (&floor, bound) {
        let problem = PendingDiagnostic::new(
            Code::Contradiction,
            "`floor` applies only to an adaptive bound",
        );
        floor.error(problem.hint("remove it, or write max_in_flight = \"adaptive\""));
    }
    let floor = section.integer("floor");
    let reserve = section.table("reserve", &keys::RESERVE);
    let [critical_ppm, normal_ppm] = ["critical", "normal"].map(|key| reserve.share(key).ppm());
    if critical_ppm + normal_ppm > 1_000_000 {
        let message = "the shares in `reserve` add up to more than 1";
        let hint = "lower `critical` or `normal`: together they may be at most 1";
        reserve.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
    }
    reserve.finish();
    section.finish();
    there.then_some(OverloadSettings {
        bound: bound?,
        critical_ppm,
        normal_ppm,
        floor: super::process::to_usize(floor),
    })
}

/// Reads `max_in_flight`. `None` if there is no bound.
fn bound(value: &ConfigValue<'_>) -> Option<InFlightBound> {
    if value.is_string() {
        let choices = [("adaptive", Some(InFlightBound::Adaptive)), ("off", None)];
        return value.text()?.choice(&choices, &[], "")?;
    }
    let bound = value.integer()?;
    Some(InFlightBound::Fixed(super::process::to_usize(bound)))
}
