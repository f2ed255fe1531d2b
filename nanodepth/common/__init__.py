"What everything uses: errors, options, files, the loss and tables."
