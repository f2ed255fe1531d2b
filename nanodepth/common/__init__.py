"Refusals, files and options, which all commands use."
