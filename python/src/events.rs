//! Passes events from a job's thread to the caller's thread.

use std::sync::Mutex;
use std::sync::mpsc::Sender;

use quant_core::wording::worded;
use quant_core::{Event, Observer};
use serde_json::{Value, json};

use crate::wording::Keywords;

/// Sends every event through a channel. Nothing happens if the receiver was dropped.
pub struct Channel {
    pub sender: Mutex<Sender<Event>>,
    pub wants_estimate: bool,
}

impl Observer for Channel {
    fn event(&self, event: &Event) {
        let sender = self.sender.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _ = sender.send(event.clone());
    }

    fn wants_estimate(&self) -> bool {
        self.wants_estimate
    }
}

/// Returns the kind of an event, which is the name of its Python class, and its fields as JSON; `None` for events that
/// have no Python class.
pub fn fields(event: &Event) -> Option<(&'static str, Value)> {
    let reworded = |message: &str| worded(message, &Keywords).into_owned();
    Some(match event {
        Event::StageStarted { stage, unit, units } => {
            ("StageStarted", json!({ "stage": stage, "unit": unit, "units": units }))
        }
        Event::Resumed { units } => ("Resumed", json!({ "units": units })),
        Event::UnitDone { detail } => ("UnitDone", json!({ "detail": detail })),
        Event::StageDone => ("StageDone", json!({})),
        Event::StepStarted { step } => ("StepStarted", json!({ "step": step })),
        Event::StepDone { step, elapsed } => {
            ("StepDone", json!({ "step": step, "seconds": elapsed.as_secs_f64() }))
        }
        Event::Warning { message } => ("Warned", json!({ "message": reworded(message) })),
        Event::Note { label, message } => ("Noted", json!({ "label": label, "message": reworded(message) })),
        Event::Expected { stage, seconds } => ("Expected", json!({ "stage": stage, "seconds": seconds })),
        _ => return None,
    })
}
