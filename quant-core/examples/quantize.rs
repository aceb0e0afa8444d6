//! Quantizes a model with AWQ in one call and prints its progress.
//!
//! ```text
//! cargo run --release -p quant-core --example quantize -- MODEL TEXT OUT
//! ```
use quant_core::run::{Host, Nothing, QuantizeRequest, RecipeSettings, Text, quantize};
use quant_core::{CancelToken, Event, Observer, Result};

/// Receives progress events on the thread that drives the run. The library prints nothing.
struct Progress;

impl Observer for Progress {
    fn event(&self, event: &Event) {
        match event {
            Event::StageStarted { stage, unit, units } => eprintln!("{stage}: {units} {unit}s"),
            Event::UnitDone { detail } => eprintln!("  {detail} done"),
            _ => {}
        }
    }
}

fn main() -> Result<()> {
    let [model, text, out] = [1, 2, 3].map(|i| std::env::args().nth(i).expect("MODEL TEXT OUT"));
    let settings = RecipeSettings { preset: Some("awq-w4a16".into()), ..RecipeSettings::default() };
    let calibration = Some(Text::Named(text));
    let request = QuantizeRequest { settings, calibration, ..QuantizeRequest::new(model, out) };
    // Another thread may cancel the run, which then stops between two units of work and the same request
    // continues.
    let cancel = CancelToken::new();
    let done = quantize(&request, &Host::new(&Progress, &cancel, &Nothing))?;
    println!("{}", done.summary_json()?);
    Ok(())
}
