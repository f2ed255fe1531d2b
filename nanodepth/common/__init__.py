"What everything uses: refusals and files."
