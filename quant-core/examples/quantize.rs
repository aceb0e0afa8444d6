//! AWQ in one call: a directory in, a checkpoint out, with progress of the program's own.
//!
//! ```text
//! cargo run --release -p quant-core --example quantize -- MODEL TEXT OUT
//! ```
use quant_core::run::{Host, Nothing, QuantizeRequest, RecipeSettings, Text, quantize};
use quant_core::{CancelToken, Event, Observer, Result};

/// Progress arrives as events, on the thread that drives the run; the library prints nothing.
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
    // Cancelled from another thread, it stops where nothing is lost; `request.resume` goes on from there.
    let cancel = CancelToken::new();
    let done = quantize(&request, &Host::new(&Progress, &cancel, &Nothing))?;
    println!("{}", done.summary_json()?);
    Ok(())
}
